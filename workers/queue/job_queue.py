"""The worker's side of the Celery queues: putting work back, and seeing whether any message
waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from celery import Celery
from redis import Redis

from poc_core.queues import ROUND_STEP_TASK, RUN_BATCH_TASK, model_queue, worker_queue

# Messages in one round trip to Redis.
_PIPELINED = 100


class JobQueue:
    """The queue of one model's batches, shared by all its workers."""

    def __init__(self, app: Celery, redis: Redis, model: str) -> None:
        self._app = app
        self._redis: Any = redis
        self._name = model_queue(model)

    def publish(self, job_id: str, batch_indexes: Iterable[int]) -> None:
        """One message per batch. A message too many does no harm: its claim is refused."""
        indexes = list(batch_indexes)
        with self._app.producer_pool.acquire(block=True) as producer:
            together = producer.batch(max_size=_PIPELINED) if len(indexes) > 1 else nullcontext()
            with together:
                for index in indexes:
                    self._app.send_task(
                        RUN_BATCH_TASK, args=[job_id, index], queue=self._name, producer=producer
                    )

    def is_empty(self) -> bool:
        """Whether no message waits (kombu keeps a queue as a Redis list of its name)."""
        return bool(self._redis.llen(self._name) == 0)


class StepQueue:
    """The queue of one worker alone: its next step in a round."""

    def __init__(self, app: Celery, redis: Redis, worker_id: str) -> None:
        self._app = app
        self._redis: Any = redis
        self._name = worker_queue(worker_id)

    def publish(self, round_id: str) -> None:
        self._app.send_task(ROUND_STEP_TASK, args=[round_id], queue=self._name)

    def is_empty(self) -> bool:
        return bool(self._redis.llen(self._name) == 0)
