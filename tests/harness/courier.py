"""A courier, its outboxes, and a receiver whose answers a test chooses."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from redis import Redis

from poc_core.records import NewJob, RoundRecord
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Due, Outbox, Receivers
from poc_core.state.parsing import OutboxStatus
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    MODEL,
    REQUEST,
    SPEC,
    Clock,
    complete_batch,
    complete_lease,
    lease_batch,
    lease_nonces,
    leased,
)
from tests.harness.stored import outbox_status
from workers.courier.courier import Courier
from workers.courier.main import Ticker
from workers.courier.poster import Poster

Answer = int | Exception

ADDRESS = "10.0.0.9"


class Receiver:
    """Gives the answers in `answers`, then 200, and keeps the accepted payloads."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[httpx.Request] = []
        self.taken: list[dict[str, Any]] = []
        self.poster = poster(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        if answer < 300:
            self.taken.append(json.loads(request.content))
        return httpx.Response(answer)

    @property
    def nonces(self) -> list[int]:
        return [artifact["nonce"] for payload in self.taken for artifact in payload["artifacts"]]


def poster(answer: Callable[[httpx.Request], httpx.Response], address: str = ADDRESS) -> Poster:
    """One for which every name is `address`, of the operator's network."""
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Poster(
        client, Settings().callbacks, lookup=lambda name, port: [(0, 0, 0, "", (address, port))]
    )


def deliver(courier: Courier, outbox_id: str) -> None:
    asyncio.run(courier.deliver(outbox_id))


def compute(rounds: RoundStore, record: RoundRecord) -> None:
    lease = leased(lease_nonces(rounds, record, "w1", 4))
    complete_lease(rounds, lease, "w1", [f"v{nonce}" for nonce in lease.nonces])


@dataclass
class Scene:
    """A courier and the one receiver of a round of which four artifacts are due."""

    redis: Redis
    clock: Clock
    rounds: RoundStore
    outbox: Outbox
    courier: Courier
    receiver: Receiver
    record: RoundRecord

    def courier_of(self, poster: Poster, max_retries: int | None = None) -> Courier:
        receivers = Receivers(self.redis, self.clock)
        return Courier(self.outbox, receivers, poster, max_retries=max_retries)

    def deliver(self, outbox_id: str = "", courier: Courier | None = None) -> None:
        deliver(courier or self.courier, outbox_id or self.record.round_id)

    def compute(self) -> None:
        compute(self.rounds, self.record)

    def status(self, outbox_id: str = "") -> OutboxStatus:
        return outbox_status(self.redis, outbox_id or self.record.round_id)


class Offers:
    """Stands in for the courier: keeps what it is offered."""

    def __init__(self) -> None:
        self.all: list[Due] = []
        self.renewed = 0

    def offer(self, due: Due) -> None:
        self.all.append(due)

    def renew_locks(self) -> None:
        self.renewed += 1


def tick(ticker: Ticker) -> None:
    """What its thread does each TICK_S."""
    ticker._ticks.once()  # noqa: SLF001


def finished_job(jobs: JobStore, url: str, n_nonces: int = 1) -> str:
    request = REQUEST.model_copy(update={"url": url})
    job_id = jobs.create(NewJob(MODEL, SPEC, request, list(range(n_nonces)), n_nonces))
    leased(lease_batch(jobs, job_id, 0, "w1"))
    complete_batch(jobs, job_id, 0, ["A" * 32] * n_nonces)
    assert jobs.finish(job_id)
    return job_id
