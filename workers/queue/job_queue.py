"""The worker's side of the Celery queues: puts work back, sees whether any message waits."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from celery import Celery
from redis import Redis

from poc_core.queues import ROUND_STEP_TASK, RUN_BATCH_TASK, messages, model_queue, worker_queue

# Messages in which one is looked for: a millisecond or two of Redis' time.
_MOST_SEARCHED = 10_000
# Messages in one round trip to Redis.
_PIPELINED = 100


class _Queue:
    def __init__(self, app: Celery, redis: Redis, name: str) -> None:
        self._app = app
        self._redis: Any = redis
        self._name = name

    def is_empty(self) -> bool:
        """True if no message waits."""
        return bool(self._redis.llen(messages(self._name)) == 0)


class JobQueue(_Queue):
    """The queue of one model's batches, shared by all its workers."""

    def __init__(self, app: Celery, redis: Redis, model: str) -> None:
        super().__init__(app, redis, model_queue(model))

    def newest(self) -> bytes:
        """The message that was put there last; b"": none waits."""
        return bytes(self._redis.lindex(messages(self._name), 0) or b"")

    def holds(self, message: bytes) -> bool:
        """True if the message waits, or may: among so many that Redis would be held up none is
        looked for.
        """
        name = messages(self._name)
        if not message:
            return False
        n = self._redis.llen(name)
        return n > _MOST_SEARCHED or self._redis.lpos(name, message) is not None

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


class StepQueue(_Queue):
    """The queue of one worker alone: its next step in a round."""

    def __init__(self, app: Celery, redis: Redis, worker_id: str) -> None:
        super().__init__(app, redis, worker_queue(worker_id))

    def publish(self, round_id: str) -> None:
        self._app.send_task(ROUND_STEP_TASK, args=[round_id], queue=self._name)
