"""The node's own ports, which no callback may reach."""

import ipaddress
from dataclasses import replace

import pytest
from redis import Redis

from poc_core.redis_at.url import RedisUrl
from poc_core.settings import Settings
from poc_core.state.registry import WorkerRegistry
from tests.harness.courier import Scene
from tests.harness.samples import Clock, worker_record
from workers.courier.main import NodePorts


def test_own_ports_are_also_those_of_redis_and_of_apis_elsewhere(
    redis: Redis, workers: WorkerRegistry, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    addresses = {"redis": "172.18.0.2", "sentinel": "172.18.0.9"}
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda host, *_, **__: [(0, 0, 0, "", (addresses[host], 0))],
    )
    ports = NodePorts(frozenset({8000}), workers, RedisUrl.of("redis://redis:6380/0"))
    of_redis = (ipaddress.ip_address("172.18.0.2"), 6380)
    workers.store_api_addresses()
    ports.look()
    of_apis = ports.now() - {8000, of_redis}
    assert of_redis in ports.now()
    assert all(isinstance(one, tuple) and one[1] == 8000 for one in of_apis)
    assert not any(isinstance(one, tuple) and one[0].is_loopback for one in of_apis)
    redis.zadd("poc:api", {"172.18.0.3 8000": clock.now, "nonsense": clock.now})
    ports.look()
    assert (ipaddress.ip_address("172.18.0.3"), 8000) in ports.now()
    sentinels = NodePorts(
        frozenset(), workers, RedisUrl.of("redis+sentinel://sentinel:26379/primary/0")
    )
    sentinels.look()
    at = ipaddress.ip_address("172.18.0.9")
    assert {(at, 26379), (at, 6379)} <= sentinels.now()
    clock.now += 3600
    ports.look()
    assert ports.now() == {8000, of_redis}


def test_each_port_of_an_api_that_has_several_is_the_nodes_own(scene: Scene) -> None:
    workers = WorkerRegistry(scene.redis, Settings(api_port="8080 5000"))
    workers.store_api_addresses()
    found = [one for one in workers.ports() if isinstance(one, tuple)]
    assert {port for _, port in found} == {8080, 5000}
    assert len(found) == 2 * len({address for address, _ in found})


def test_own_ports_are_those_of_the_settings_and_of_workers_that_live(
    workers: WorkerRegistry,
) -> None:
    ports = NodePorts(frozenset({8000}), workers)
    workers.heartbeat(replace(worker_record("w1"), port=9123))
    assert ports.now() == {8000}
    ports.look()
    assert ports.now() == {8000, 9123}
