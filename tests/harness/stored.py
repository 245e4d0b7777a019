"""What lies in Redis, for tests that look behind the stores."""

from typing import Any

from redis import Redis

from poc_core.state import keys
from poc_core.state.overview import Overviews
from poc_core.state.parsing import OutboxStatus, SilentReceiver


def outbox_status(redis: Redis, outbox_id: str) -> OutboxStatus:
    """The status of a round's or a job's callbacks."""
    stored: Any = redis.hgetall(keys.outbox(outbox_id))
    return OutboxStatus.of(stored)


def n_outboxes(redis: Redis) -> int:
    """Rounds and jobs whose receiver has not got everything."""
    return Overviews(redis).read().callbacks_waiting


def spared_receivers(redis: Redis) -> list[SilentReceiver]:
    """The receivers that are tried with one payload of jobs at a time."""
    return [*Overviews(redis).read().silent]
