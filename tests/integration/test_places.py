"""Callbacks' places in a real Redis, which takes fewer numbers for numbers than the tests' own."""

from collections.abc import Iterator

import pytest
from redis import Redis

from poc_core.records import Lease, NewJob
from poc_core.settings import Settings
from poc_core.state import JobStore, Outbox, WorkerRegistry, keys
from poc_core.state.delivery.receivers import BREAKS_AT, Receivers
from tests.harness.samples import MODEL, REQUEST, SPEC, lease_batch, worker_record
from tests.stacks.own_redis import own_redis

pytestmark = pytest.mark.integration

VECTOR = "A" * 32  # 24 bytes of zeros
# 64 places, the fewest there are.
SETTINGS = Settings(outbox_max_bytes=64 * 512 * 1024)


@pytest.fixture
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    data = tmp_path_factory.mktemp("redis")
    with own_redis(data) as own, Redis.from_url(own.url) as client:
        WorkerRegistry(client, SETTINGS).heartbeat(worker_record())
        yield client


@pytest.fixture
def jobs(redis: Redis) -> JobStore:
    return JobStore(redis, SETTINGS)


def queued(jobs: JobStore, client: str, receiver: str) -> str:
    request = REQUEST.model_copy(update={"url": f"http://{receiver}/poc"})
    return jobs.create(NewJob(MODEL, SPEC, request, [5], 1, client=client))


def compute(jobs: JobStore, job_id: str) -> None:
    assert isinstance(lease_batch(jobs, job_id, 0, "w1"), Lease)
    jobs.complete(job_id, 0, [VECTOR])
    assert jobs.finish(job_id)


def n_bytes(redis: Redis) -> int:
    found: bytes | None = redis.get("poc:outbox:job_bytes")  # type: ignore[assignment]
    return int(found or 0)


def test_jobs_not_computed_yet_whose_receiver_is_dead_give_way(
    jobs: JobStore, redis: Redis
) -> None:
    dead = {queued(jobs, f"greedy {number % 40}", "dead:1") for number in range(64)}
    receivers = Receivers(redis)
    for _ in range(BREAKS_AT):
        receivers.silent("dead:1")
    honest = {queued(jobs, "honest", "alive:1") for _ in range(16)}
    waiting = {name.decode() for name in redis.hkeys("poc:outbox:of_jobs")}  # type: ignore[union-attr]
    assert honest <= waiting
    assert len(waiting) == 64
    assert n_bytes(redis) == 0
    given_up = min(dead - waiting)
    compute(jobs, given_up)
    assert jobs.result(given_up) is not None
    assert n_bytes(redis) == 0


def test_a_delivery_ends_whose_entries_are_gone(jobs: JobStore, redis: Redis) -> None:
    job_id = queued(jobs, "honest", "alive:1")
    compute(jobs, job_id)
    outbox = Outbox(redis, SETTINGS)
    delivery = outbox.take(job_id)
    assert delivery is not None
    redis.delete(keys.outbox(job_id) + ":entries")
    assert outbox.delivered(delivery)
    assert outbox.take(job_id) is None
    assert not redis.hexists("poc:outbox:of_jobs", job_id)
