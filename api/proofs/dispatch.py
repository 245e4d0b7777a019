"""Sends Celery messages that wake workers when there is work."""

import logging
from collections.abc import Iterable
from itertools import repeat

from celery import Celery
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from poc_core import queues
from poc_core.settings import Settings

log = logging.getLogger(__name__)

# Most messages sent in one round trip to Redis.
_PIPELINED = 100


class Dispatcher:
    """Sends wake-up messages to the workers of a model. Thread-safe.

    If the broker fails, only logs the error, because workers also find stored work by polling.
    """

    def __init__(self, settings: Settings) -> None:
        config = queues.celery_config(settings)
        # One try, because a client waits for the answer. (Kombu's default is to retry for ever.)
        config["broker_transport_options"] |= {
            "max_retries": 1,
            "interval_start": 0,
            "interval_max": 0.1,
        }
        self._celery = Celery("proofline-api", set_as_current=False)
        self._celery.conf.update(config)

    def wake(self, model: str, most: int) -> None:
        """Wakes idle workers of the model, but no more than `most` workers."""
        self._publish(model, repeat(queues.model_queue(model), most))

    def wake_each(self, model: str, worker_ids: Iterable[str]) -> None:
        self._publish(model, map(queues.worker_queue, worker_ids))

    def close(self) -> None:
        self._celery.close()

    def _publish(self, model: str, names: Iterable[str]) -> None:
        try:
            with (
                self._celery.producer_or_acquire() as producer,
                producer.batch(max_size=_PIPELINED),
            ):
                for name in names:
                    self._celery.send_task(
                        queues.WORK_TASK,
                        [model],
                        queue=name,
                        # a queue on Redis needs no declaration, which takes a fifth of the time
                        declare=[],
                        producer=producer,
                        retry=False,
                        ignore_result=True,
                    )
        except (KombuError, RedisError, OSError) as error:
            log.warning("work of %s is stored, but its workers were not woken: %s", model, error)
