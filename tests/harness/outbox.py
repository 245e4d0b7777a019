"""Fills, takes and reads a node's outboxes."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis

from poc_core.records import Lease, NewJob, RoundRecord, RoundState
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Delivery, Outbox
from poc_core.state.parsing import OutboxStatus
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    MODEL,
    REQUEST,
    SPEC,
    Clock,
    complete_batch,
    complete_lease,
    known,
    lease_batch,
    lease_nonces,
    leased,
    round_config,
)
from tests.harness.stored import outbox_status

URL = "http://receiver:9000/poc"
VECTOR = "A" * 32  # 24 bytes of zeros


def content(delivery: Delivery) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(delivery.body)
    return decoded


def nonces_of(delivery: Delivery) -> list[int]:
    return [artifact["nonce"] for artifact in content(delivery)["artifacts"]]


class Box:
    """The outboxes of one node, with the rounds and jobs that fill them."""

    def __init__(self, redis: Redis, settings: Settings, clock: Clock) -> None:
        self.redis, self.settings, self.clock = redis, settings, clock
        self.rounds = RoundStore(redis, settings, clock)
        self.jobs = JobStore(redis, settings, clock)
        self.outbox = Outbox(redis, settings, clock)

    def with_settings(self, **changes: int) -> "Box":
        return Box(self.redis, self.settings.model_copy(update=changes), self.clock)

    def start(self, **changes: Any) -> RoundRecord:
        config = round_config(**changes)
        return known(self.rounds.read(self.rounds.store(config, RoundState.GENERATING)))

    def lease(self, record: RoundRecord, places: int) -> Lease:
        return leased(lease_nonces(self.rounds, record, "w1", places))

    def compute(self, record: RoundRecord, places: int = 4, vector: str = "v{}") -> Lease:
        lease = self.lease(record, places)
        complete_lease(self.rounds, lease, "w1", [vector.format(nonce) for nonce in lease.nonces])
        return lease

    def finish(
        self,
        claimed: dict[int, str] | None = None,
        url: str | None = URL,
        nonces: Sequence[int] = (5, 6),
        values: Sequence[str | None] | None = None,
    ) -> str:
        request = REQUEST.model_copy(update={"url": url})
        job_id = self.jobs.create(NewJob(MODEL, SPEC, request, nonces, len(nonces), claimed))
        assert isinstance(lease_batch(self.jobs, job_id, 0, "w1"), Lease)
        complete_batch(self.jobs, job_id, 0, values or [VECTOR] * len(nonces))
        assert self.jobs.finish(job_id)
        return job_id

    def interval_passes(self) -> None:
        self.clock.now += self.settings.callback_interval_sec

    def take(self, outbox_id: str) -> Delivery:
        return known(self.outbox.take(outbox_id))

    def drain(
        self, outbox_id: str, after_each: Callable[[], None] = lambda: None
    ) -> list[Delivery]:
        """Delivers what is due, and returns it."""
        taken = []
        while (delivery := self.outbox.take(outbox_id)) is not None:
            taken.append(delivery)
            self.outbox.delivered(delivery)
            after_each()
        return taken

    def status(self, outbox_id: str) -> OutboxStatus:
        return outbox_status(self.redis, outbox_id)

    def expires_soon(self, outbox_id: str) -> None:
        for suffix in ("", ":entries"):
            self.redis.expire(f"poc:outbox:{outbox_id}{suffix}", 100)

    def ttl(self, outbox_id: str) -> int:
        ttls = {int(self.redis.ttl(f"poc:outbox:{outbox_id}{key}")) for key in ("", ":entries")}
        (ttl,) = ttls
        return ttl
