"""Waiting callbacks in a real Redis, which takes fewer numbers for numbers than the tests' own."""

from collections.abc import Iterator

import pytest
from redis import Redis

from poc_core.errors import QueueFullError
from poc_core.records import Lease, NewJob
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import MODEL, REQUEST, SPEC, complete_batch, lease_batch, worker_record
from tests.stacks.own_redis import own_redis

pytestmark = pytest.mark.integration

VECTOR = "A" * 32  # 24 bytes of zeros
# 64 callbacks, the fewest there may be.
SETTINGS = Settings(outbox_max_bytes=64 * 512 * 1024, worker_ttl_s=120)


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
    complete_batch(jobs, job_id, 0, [VECTOR])
    assert jobs.finish(job_id)


def test_a_client_has_a_quarter_of_the_callbacks(jobs: JobStore, redis: Redis) -> None:
    waiting = {queued(jobs, "greedy", f"dead:{number}") for number in range(16)}
    with pytest.raises(QueueFullError, match="as many as one client may have"):
        queued(jobs, "greedy", "alive:1")
    compute(jobs, next(iter(waiting)))
    waiting.add(queued(jobs, "honest", "alive:1"))
    assert {name.decode() for name in redis.hkeys("poc:outbox:of_jobs")} == waiting  # type: ignore[union-attr]


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
