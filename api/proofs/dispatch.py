"""The Celery producer: tells workers that batches wait."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from poc_core.queues import (
    ROUND_STEP_TASK,
    RUN_BATCH_TASK,
    celery_config,
    model_queue,
    worker_queue,
)
from poc_core.settings import Settings

log = logging.getLogger(__name__)

# Messages of a job between checks that it is still wanted: a stopped one delays others.
_LOOK = 500

# Messages in one round trip to Redis: few enough that workers begin some 10 ms after a job was
# stored, enough that round trips cost little beside a message (0.12 ms of CPU time).
_PIPELINED = 100

# Messages a client waits for, about a second's worth; the rest of a large job follows behind.
_AT_ONCE = 4000

# Messages of one job before another job has its turn in the background.
_TURN = 1000


class Dispatcher:
    """Publisher of one message per batch, from any thread.

    A broker that fails on the way is no error for the client: the job is stored, and a worker's
    reaper publishes what waits without a message. The same holds for an API process that dies
    before the last message of a large job.
    """

    def __init__(
        self, settings: Settings, is_wanted: Callable[[str], bool] = lambda _: True
    ) -> None:
        """`is_wanted(job_id)`: whether a job has not ended."""
        self._is_wanted = is_wanted
        config = celery_config(settings)
        # A client waits for the answer: one try, then an error. (By default kombu tries for ever.)
        config["broker_transport_options"] |= {
            "max_retries": 1,
            "interval_start": 0,
            "interval_max": 0.1,
        }
        self._celery = Celery("proofline-api", set_as_current=False)
        self._celery.conf.update(config)
        self._background = ThreadPoolExecutor(1, "dispatch")
        self._closed = False

    def publish(self, model: str, job_id: str, n_batches: int) -> None:
        """Publishes the batches 0 .. n_batches - 1 of a stored job."""
        published = self._publish(model, job_id, range(min(n_batches, _AT_ONCE)))
        if published and n_batches > _AT_ONCE:
            self._background.submit(self._publish_rest, model, job_id, _AT_ONCE, n_batches)

    def publish_steps(self, worker_ids: Sequence[str], round_id: str) -> None:
        """Wakes workers for a round; one that hears nothing joins with its next heartbeat."""
        try:
            with self._celery.producer_or_acquire() as producer:
                for worker_id in worker_ids:
                    self._send(ROUND_STEP_TASK, [round_id], worker_queue(worker_id), producer)
        except (KombuError, RedisError, OSError) as error:
            log.warning("round %s is stored, but its workers were not told: %s", round_id, error)

    def close(self) -> None:
        """Gives up what is still to be published: the reaper will publish it."""
        self._closed = True
        self._background.shutdown(cancel_futures=True)
        self._celery.close()

    def _publish_rest(self, model: str, job_id: str, first: int, n_batches: int) -> None:
        published = self._publish(model, job_id, range(first, min(first + _TURN, n_batches)))
        if published and first + _TURN < n_batches and not self._closed:
            self._background.submit(self._publish_rest, model, job_id, first + _TURN, n_batches)

    def _publish(self, model: str, job_id: str, batch_indexes: Sequence[int]) -> bool:
        queue = model_queue(model)
        try:
            for first in range(0, len(batch_indexes), _LOOK):
                if batch_indexes[first] > 0 and not self._is_wanted(job_id):
                    return False
                with (
                    self._celery.producer_or_acquire() as producer,
                    producer.batch(max_size=_PIPELINED),
                ):
                    for index in batch_indexes[first : first + _LOOK]:
                        self._send(RUN_BATCH_TASK, [job_id, index], queue, producer)
        except (KombuError, RedisError, OSError) as error:
            log.warning(
                "job %s is stored, but not all its batches were published: %s", job_id, error
            )
            return False
        return True

    def _send(self, task: str, args: list[Any], queue: str, producer: Any) -> None:
        self._celery.send_task(
            task,
            args,
            queue=queue,
            # on Redis a queue needs no declaration, which would cost a fifth of the time
            declare=[],
            producer=producer,
            retry=False,
            ignore_result=True,
        )
