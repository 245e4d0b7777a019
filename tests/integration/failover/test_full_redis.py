"""A Redis that is out of memory takes some writes and not others: what scripts leave half done."""

from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, OutOfMemoryError

from cli.supervise.processes import Child, ChildSpec
from cli.supervise.redis_server import OwnRedis, wait_for_redis
from poc_core.records import JobStatus
from poc_core.settings import Settings
from poc_core.state import JobStore
from tests.harness.samples import MODEL, new_job
from workers.queue import broker
from workers.queue.app import create_app

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    own = OwnRedis(tmp_path_factory.mktemp("redis"))
    child = Child(ChildSpec("redis", own.command), lambda *_: None, lambda _: None)
    child.start()
    try:
        wait_for_redis(own.url)
        yield own.url
    finally:
        child.stop()
        own.release()


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
