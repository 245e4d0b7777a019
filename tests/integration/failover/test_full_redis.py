"""A Redis that is out of memory takes some writes and not others: what scripts leave half done."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest
from redis import Redis
from redis.exceptions import ConnectionError, OutOfMemoryError, RedisError

from poc_core.records import JobStatus, Lease
from poc_core.settings import Settings
from poc_core.state import scripts
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import LAST_BACKOFF_S, Outbox, Receivers
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.courier import Receiver, Scene
from tests.harness.samples import (
    MODEL,
    Clock,
    due_now,
    known,
    new_job,
    work_of,
    worker_record,
)
from tests.harness.stored_rounds import start
from tests.stacks.own_redis import own_redis
from workers.courier.courier import Courier
from workers.queue import broker
from workers.queue.app import create_app
from workers.work import finish_or_fail

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_redis(tmp_path_factory.mktemp("redis")) as own:
        yield own.url


@pytest.fixture
def redis(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.flushall()


def test_a_stop_that_cannot_cancel_jobs_loses_none(redis: Redis) -> None:
    jobs = JobStore(redis, Settings())
    ids = [jobs.create(new_job([nonce])) for nonce in range(3)]
    redis.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        jobs.cancel_queued()
    redis.config_set("maxmemory", 0)
    assert jobs.active_jobs(MODEL) == ids
    assert jobs.cancel_queued() == len(ids)
    assert {record.status for record in jobs.read_all(ids) if record} == {JobStatus.CANCELLED}


def test_a_worker_that_connects_meanwhile_does_not_end_but_connects_anew(
    redis: Redis, url: str
) -> None:
    with create_app(url, "worker").connection() as connection:
        redis.config_set("maxmemory", 1)
        connection.transport.cycle.on_poll_init(None)  # looks for unacknowledged messages
        with pytest.raises(ConnectionError):
            broker.queue("poc.model.m")(connection.default_channel).declare()
        redis.config_set("maxmemory", 0)
        broker.queue("poc.model.m")(connection.default_channel).declare()


def test_what_waits_is_delivered_although_it_fills_redis(redis: Redis) -> None:
    settings, clock, receiver = Settings(), Clock(), Receiver()
    rounds, outbox = RoundStore(redis, settings, clock), Outbox(redis, settings, clock)
    couriers = Courier(outbox, Receivers(redis, clock), receiver.poster)
    scene = Scene(redis, clock, rounds, outbox, couriers, receiver, start(rounds))
    scene.compute()
    redis.config_set("maxmemory", 1)
    clock.now += settings.callback_interval_sec
    receiver.answers = [httpx.ConnectError("not yet")]
    assert due_now(outbox) == [scene.record.round_id]
    scene.deliver()  # the receiver is silent
    clock.now += LAST_BACKOFF_S
    delivery = known(outbox.take(scene.record.round_id))
    assert outbox.renew(delivery)
    outbox.failed(delivery, "503")
    assert due_now(outbox) == []
    assert outbox.take(scene.record.round_id) is None  # not yet
    clock.now += LAST_BACKOFF_S
    scene.deliver()
    assert receiver.nonces == [0, 1, 2, 3]
    assert scene.status().waiting == 0


class Users:
    """All that API and workers ask for, drawn by a seed."""

    def __init__(self, redis: Redis, seed: int) -> None:
        self.jobs = JobStore(redis, Settings())
        self.workers = WorkerRegistry(redis, Settings())
        self.work = work_of(self.jobs, "w1")
        self.ids: list[str] = []
        self._rng = random.Random(seed)
        self._leases: list[Lease] = []

    def ask(self) -> None:
        """One thing of one job, or of all. RedisError: not now."""
        frequent = [self._create, self._lease, self._complete, self._release]
        rare: list[Callable[[], object]] = [
            self._lose_a_worker,
            self.jobs.cancel_queued,
            self.jobs.recount,
            self.look_after,
        ]
        self._rng.choice([*frequent * 4, *rare])()

    def look_after(self) -> None:
        """As a worker's housekeeping."""
        for found in self.work.stuck(MODEL):
            assert found.broken == []
            for job_id in found.unfinished:
                finish_or_fail(self.jobs, job_id)

    def _create(self) -> None:
        job = new_job(list(range(self._rng.randint(1, 6))))
        self.ids.append(self.jobs.create(replace(job, inline=self._rng.random() < 0.2)))

    def _lease(self) -> None:
        found = self.work.lease(MODEL)
        if isinstance(found, list) and found:
            self._leases += [*found, *self.work.lease_more(found[0], 4)]

    def _complete(self) -> None:
        if self._leases:
            lease = self._rng.choice(self._leases)
            if self.work.complete(lease, ["v"] * len(lease.nonces)):
                finish_or_fail(self.jobs, lease.owner_id)

    def _release(self) -> None:
        if self._leases:
            lease = self._leases.pop(self._rng.randrange(len(self._leases)))
            self.work.release(lease, lost_engine=self._rng.random() < 0.5)

    def _lose_a_worker(self) -> None:
        self.workers.remove("w1")
        self.workers.heartbeat(worker_record("w1"))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_asked_of_a_redis_that_is_full_now_and_then_every_job_ends(
    redis: Redis, seed: int
) -> None:
    scripts.load_all(redis)
    users, rng = Users(redis, seed), random.Random(seed)
    users.workers.heartbeat(worker_record("w1"))
    for _ in range(120):
        redis.config_set("maxmemory", int(rng.random() < 0.3))
        with suppress(RedisError):
            users.ask()
    redis.config_set("maxmemory", 0)
    users.workers.remove("w1")
    users.look_after()
    jobs, work = users.jobs, work_of(users.jobs, "w2")
    while isinstance(found := work.lease(MODEL), list) and found:
        work.complete(found[0], ["v"] * len(found[0].nonces))
    for job_id in jobs.active_jobs(MODEL):
        redis.delete(f"poc:job:{job_id}:finishing")  # whoever could not finish it
        finish_or_fail(jobs, job_id)
    assert all(record and record.status.is_final for record in jobs.read_all(users.ids))
    assert (jobs.recount(), jobs.active_jobs(MODEL)) == (0, [])
