"""Sends wake-up messages to one worker or to any worker of a model; removes superfluous ones."""

from typing import Any

from celery import Celery
from redis import Redis

from poc_core import queues
from poc_core.state import keys


class Wake:
    """The two message queues that wake a worker: one for this worker, one for all of its model."""

    def __init__(self, app: Celery, redis: Redis, model: str, worker_id: str) -> None:
        self._app = app
        self._redis: Any = redis
        self._model = model
        self._own_queue = queues.worker_queue(worker_id)

    def another(self) -> None:
        """Wakes any idle worker of the model. Used when this worker has to wait for chat."""
        self._app.send_task(
            queues.WORK_TASK, args=[self._model], queue=queues.model_queue(self._model)
        )

    def myself(self) -> None:
        """Wakes this worker again, after the messages that its own queue already holds."""
        self._app.send_task(queues.WORK_TASK, args=[self._model], queue=self._own_queue)

    def trim(self) -> None:
        """Cuts the model's queue, which grows while workers are busy, to one message per worker."""
        n_workers = max(1, self._redis.zcard(keys.WORKERS))
        self._redis.ltrim(queues.messages(queues.model_queue(self._model)), 0, n_workers - 1)

    def waits(self) -> bool:
        """Returns True if this worker's own queue holds a message."""
        return bool(self._redis.llen(queues.messages(self._own_queue)) > 0)
