"""Names of queues and tasks, and Celery's configuration. Does not import Celery."""

from typing import Any, Literal

from poc_core.redis_at.url import RedisUrl
from poc_core.settings import REDIS_TIMEOUT_S, Settings

WORK_TASK = "proofline.work"  # args: [model]: the model has work, which Redis describes
# Tasks of earlier releases. Their messages may still be queued, and also report that there is work.
EARLIER_TASKS = ("proofline.run_batch", "proofline.round_step")

Consumer = Literal["worker", "monitor"]
"""A kind of message consumer. Unacknowledged messages return only to a consumer of their kind."""


def model_queue(model: str) -> str:
    """Returns the name of the queue that all workers of `model` consume."""
    return f"poc.model.{model}"


def worker_queue(worker_id: str) -> str:
    """Returns the name of the queue that only this worker consumes."""
    return f"poc.worker.{worker_id}"


# kombu's key names in Redis; only this module uses them.


def messages(queue: str) -> str:
    """Returns the key of the list in which kombu keeps a queue's waiting messages."""
    return queue


def bindings(queue: str) -> str:
    """Returns the key in which kombu records that a queue exists. The key has no TTL."""
    return f"_kombu.binding.{queue}"


def celery_config(settings: Settings, consumer: Consumer = "monitor") -> dict[str, Any]:
    """Returns Celery's configuration for a process. `consumer`: the kind of the process."""
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
            # An unavailable Redis must cause an error, not a hanging process.
            "socket_connect_timeout": REDIS_TIMEOUT_S,
            "socket_timeout": REDIS_TIMEOUT_S,
            "socket_keepalive": True,
            # A consumer that only waits for messages must also notice a lost host within seconds.
            "health_check_interval": REDIS_TIMEOUT_S,
            **(sentinels if at.master else {}),
        },
        "broker_connection_timeout": REDIS_TIMEOUT_S,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # workers outlive long outages of Redis
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
