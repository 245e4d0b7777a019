"""Names of queues and tasks, and Celery's configuration, without importing Celery."""

from typing import Any, Literal

from poc_core.redis_at.url import RedisUrl
from poc_core.settings import REDIS_TIMEOUT_S, Settings

WORK_TASK = "proofline.work"  # args: [model]: it has work, and what it is stands in Redis
# Messages of earlier releases may still wait; they too say that there is work.
EARLIER_TASKS = ("proofline.run_batch", "proofline.round_step")

Consumer = Literal["worker", "monitor"]
"""Who takes messages. Each kind brings back its own unacknowledged ones, never the others'."""


def model_queue(model: str) -> str:
    """The queue of `model`: any worker that serves it may take a message."""
    return f"poc.model.{model}"


def worker_queue(worker_id: str) -> str:
    """The queue that only this worker consumes."""
    return f"poc.worker.{worker_id}"


# How kombu names its keys in Redis: nothing else of Proofline knows.


def messages(queue: str) -> str:
    """The list in which kombu keeps the messages of a queue that nobody has taken."""
    return queue


def bindings(queue: str) -> str:
    """The key in which kombu keeps that a queue exists; it has no TTL."""
    return f"_kombu.binding.{queue}"


def celery_config(settings: Settings, consumer: Consumer = "monitor") -> dict[str, Any]:
    """Celery's configuration: JSON only, late acknowledgement, no result backend."""
    at = RedisUrl.of(settings.redis_url)
    sentinels = {"master_name": at.master, "sentinels": at.hosts, "sentinel_kwargs": at.sentinel}
    return {
        "broker_url": at.broker,
        "broker_use_ssl": at.ssl or False,
        "broker_transport_options": {
            "unacked_key": f"unacked.{consumer}",
            "unacked_index_key": f"unacked.{consumer}.index",
            "unacked_mutex_key": f"unacked.{consumer}.mutex",
            "visibility_timeout": settings.visibility_timeout_s,
            # A Redis that is away must show as an error, not as a process that hangs.
            "socket_connect_timeout": REDIS_TIMEOUT_S,
            "socket_timeout": REDIS_TIMEOUT_S,
            "socket_keepalive": True,
            # And a host that vanished within seconds, though whoever waits for messages asks none.
            "health_check_interval": REDIS_TIMEOUT_S,
            **(sentinels if at.master else {}),
        },
        "broker_connection_timeout": REDIS_TIMEOUT_S,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # workers outlive a Redis that is away for long
        "task_serializer": "json",
        "accept_content": ["json"],
        "result_backend": None,  # results live in the job record
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_default_queue": "poc.default",  # nothing is sent there: every call names its queue
        "worker_prefetch_multiplier": 1,  # a batch waits where any worker can take it
        "worker_hijack_root_logger": False,
    }
