"""Workers live by their heartbeats."""

import json
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from poc_core.settings import Settings
from poc_core.state.events import Events
from poc_core.state.registry import DEADLY_S, WorkerRegistry
from tests.harness.samples import MODEL, Clock, worker_record

Serve = Callable[..., Any]


def test_a_heartbeat_makes_a_worker_live(workers: WorkerRegistry, serve: Serve) -> None:
    record = serve("w1")
    assert workers.live() == [record]
    assert workers.is_alive("w1")
    assert not workers.is_alive("w2")


def test_a_starting_worker_is_live_and_its_model_is_not_known_yet(
    workers: WorkerRegistry, serve: Serve
) -> None:
    record = serve("w1", state="starting")
    assert workers.live() == [record]
    assert workers.known_models() == {}


def test_workers_can_be_asked_for_by_model(workers: WorkerRegistry, serve: Serve) -> None:
    serve("w1")
    other = serve("w2", model="other")
    assert workers.live("other") == [other]
    assert set(workers.known_models()) == {MODEL, "other"}


def test_only_workers_that_are_ready_take_new_work(workers: WorkerRegistry, serve: Serve) -> None:
    ready, other = serve("w1"), serve("w2", model="other")
    serve("w3", state="starting")
    workers.heartbeat(replace(serve("w4"), state="draining"))
    assert workers.ready() == [ready, other]
    assert workers.ready("other") == [other]


def test_workers_of_this_machine(workers: WorkerRegistry, serve: Serve) -> None:
    own = replace(serve("w1"), machine=socket.gethostname())
    workers.heartbeat(own)
    workers.heartbeat(replace(serve("w2"), machine="another"))
    assert workers.here() == [own]


def test_workers_whose_processes_ended_are_removed_by_host_and_process(
    workers: WorkerRegistry, serve: Serve
) -> None:
    for worker_id, host_id, pid in (("w1", "a", 7), ("w2", "a", 8), ("w3", "b", 7)):
        workers.heartbeat(replace(serve(worker_id), host_id=host_id, pid=pid))
    workers.remove_ended("a", {7, 9})
    assert [worker.id for worker in workers.live()] == ["w2", "w3"]


def test_a_worker_that_left_is_not_live_but_its_model_stays_known(
    workers: WorkerRegistry, serve: Serve
) -> None:
    record = serve("w1")
    workers.remove("w1")
    assert workers.live() == []
    assert workers.known_models() == {MODEL: record.info}


def test_a_worker_without_heartbeats_expires(
    workers: WorkerRegistry, serve: Serve, redis: Redis, settings: Settings
) -> None:
    serve("w1")
    assert 0 < int(redis.ttl("poc:worker:w1")) <= settings.worker_ttl_s
    redis.delete("poc:worker:w1")  # as Redis does when the time has come
    assert workers.live() == []


def test_the_index_forgets_workers_long_gone(
    workers: WorkerRegistry, serve: Serve, redis: Redis, settings: Settings, clock: Clock
) -> None:
    serve("w1")
    redis.delete("poc:worker:w1")
    clock.now += 11 * settings.worker_ttl_s
    alive = serve("w2")
    assert workers.live() == [alive]
    assert redis.zrange("poc:workers", 0, -1) == [b"w2"]


def test_a_model_is_forgotten_after_the_job_ttl(
    workers: WorkerRegistry, serve: Serve, settings: Settings, clock: Clock
) -> None:
    serve("w1")
    clock.now += settings.job_ttl_sec + 1
    serve("w2", model="other")
    assert set(workers.known_models()) == {"other"}


def test_every_key_has_a_ttl(serve: Serve, redis: Redis) -> None:
    serve("w1")
    assert [key for key in redis.scan_iter("*") if int(redis.ttl(key)) < 0] == []


def test_celery_forgets_the_queue_of_a_worker_that_left_or_is_long_gone(
    workers: WorkerRegistry, serve: Serve, redis: Redis, settings: Settings, clock: Clock
) -> None:
    gone = ["w2", "w3", "w4"]
    for worker in ("w1", *gone):
        serve(worker)
        redis.sadd(f"_kombu.binding.poc.worker.{worker}", "binding")
        redis.lpush(f"poc.worker.{worker}", "message")  # sent after its end
    workers.remove("w1")
    redis.delete(*(f"poc:worker:{worker}" for worker in gone))
    clock.now += 11 * settings.worker_ttl_s
    workers.live()
    assert redis.keys("_kombu*") == redis.keys("poc.worker.*") == []


def test_a_port_that_cannot_be_read_hides_no_other(
    workers: WorkerRegistry, serve: Serve, redis: Redis, settings: Settings, clock: Clock
) -> None:
    workers.heartbeat(replace(serve("long-gone"), port=4004))
    clock.now += 11 * settings.worker_ttl_s
    workers.heartbeat(replace(serve("good"), port=5005))
    serve("starting")
    redis.zadd("poc:ports", {b"\xff": clock.now, b"{": clock.now})
    assert workers.ports() == {5005}
    clock.now += 9 * settings.worker_ttl_s
    assert workers.ports() == {5005}


def test_a_request_that_ended_two_engines_is_refused_for_ten_minutes(
    workers: WorkerRegistry, redis: Redis, clock: Clock
) -> None:
    def died(worker: str) -> int:
        return workers.died_with(worker, "print", "A request of key x to /v1/completions")

    assert [died("w1-1"), died("w1-1")] == [1, 1]  # one engine, told twice
    assert workers.deadly() == frozenset()
    assert [died("w2-1"), died("w3-1")] == [2, 3]
    assert workers.deadly() == {"print"}
    assert workers.n_deadly() == 1
    (event,) = Events(redis).read()
    assert event.text.startswith("A request of key x to /v1/completions was in the engines of 2")
    assert event.text.endswith("it is refused for 10 minutes.")
    assert [key for key in redis.scan_iter("*") if int(redis.ttl(key)) < 0] == []
    clock.now += DEADLY_S + 1
    assert workers.deadly() == frozenset()


def test_a_request_that_an_engine_outlived_is_no_suspect(workers: WorkerRegistry) -> None:
    workers.died_with("w1", "print", "A request")
    workers.outlived("print")
    assert workers.died_with("w2", "print", "A request") == 1


FOR_EVER = 4e18


def lies(redis: Redis, worker_id: str) -> None:
    """What a host may write past our own code: a worker without an end."""
    redis.hset(f"poc:worker:{worker_id}", "record", json.dumps(asdict(worker_record(worker_id))))
    redis.zadd("poc:workers", {worker_id: FOR_EVER})


@pytest.mark.promise(
    "a compromised host",
    "cannot write other hosts' records (Redis 7), forge events of keys, "
    "or stay listed without a heartbeat",
)
def test_no_worker_lives_longer_without_a_sign_of_life_than_others(
    workers: WorkerRegistry, redis: Redis, settings: Settings
) -> None:
    lies(redis, "none")
    lies(redis, "long")
    redis.expire("poc:worker:long", 10**6)
    assert [worker.id for worker in workers.live()] == ["long", "none"]
    for worker_id in ("none", "long"):
        assert 0 < int(redis.ttl(f"poc:worker:{worker_id}")) <= settings.worker_ttl_s


def test_the_index_forgets_workers_of_the_far_future(
    workers: WorkerRegistry, serve: Serve, redis: Redis, settings: Settings, clock: Clock
) -> None:
    serve("w1")
    redis.zadd("poc:workers", {"w2": FOR_EVER})
    soon = clock.now + 11 * settings.worker_ttl_s
    redis.zadd("poc:ports", {"22": FOR_EVER, "23": soon})
    assert workers.ports() == set()
    workers.heartbeat(replace(serve("w1"), port=5005))
    workers.live()
    assert redis.zrange("poc:workers", 0, -1) == [b"w1"]
    assert redis.zrange("poc:ports", 0, -1) == [b"5005"]


@pytest.fixture
def waited(serve: Serve, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of who waits for heartbeats. In the first one the worker `alive` beats."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            clock.now += 1.0
            serve("alive")

    time = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=sleep)
    monkeypatch.setattr("poc_core.state.registry.time", time)
    return pauses


@pytest.mark.promise(
    "a revoked host", "gets no chat after `revoke` returns, whatever the host left in Redis"
)
def test_only_those_that_beat_again_outlive_a_revoked_host(
    workers: WorkerRegistry, serve: Serve, redis: Redis, waited: list[float]
) -> None:
    alive = serve("alive")
    serve("dead")
    lies(redis, "liar")
    lies(redis, "unlisted")
    redis.zrem("poc:workers", "unlisted")
    assert workers.drop_silent(1.0) == 3
    assert sum(waited) >= 1.0
    assert workers.live() == [alive]
    assert redis.keys("poc:worker:*") == [b"poc:worker:alive"]


def test_where_all_beat_nobody_is_waited_for(
    workers: WorkerRegistry, serve: Serve, waited: list[float]
) -> None:
    assert workers.drop_silent(3600) == 0
    alive = serve("alive")
    assert workers.drop_silent(3600) == 0
    assert len(waited) == 1
    assert workers.live() == [alive]


def test_times_are_redis_own(redis: Redis, settings: Settings) -> None:
    WorkerRegistry(redis, settings).heartbeat(worker_record("w1"))
    beats: Any = redis.zrange("poc:workers", 0, -1, withscores=True)
    times: Any = redis.time()
    assert abs(beats[0][1] - times[0]) < 60


def test_a_heartbeat_that_names_no_leases_leaves_none_of_an_earlier_one(
    workers: WorkerRegistry, redis: Redis
) -> None:
    workers.heartbeat(worker_record("w1"), "4:4")
    assert redis.hget("poc:worker:w1", "in_hand") is not None
    workers.heartbeat(worker_record("w1"))
    assert redis.hget("poc:worker:w1", "in_hand") is None
