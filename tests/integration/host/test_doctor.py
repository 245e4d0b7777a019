"""`doctor` on a real Redis: each fault planted in it, named, and mended by its remedy."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cli.examine.findings import Finding
from cli.examine.redis import local_server, server
from cli.supervise.redis_server import LocalRedis, free_port
from poc_core.settings import Settings
from tests.stacks.own_redis import own_redis

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    """A Redis as `up` has it."""
    with own_redis(tmp_path_factory.mktemp("redis")) as own:
        yield own


@pytest.fixture
def client(own: LocalRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own.url) as client:
        yield client


@pytest.fixture
def settings(own: LocalRedis) -> Settings:
    return Settings(redis_url=own.url)


@pytest.fixture(autouse=True)
def no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with other work answers late, and that is no fault of its Redis."""
    monkeypatch.setattr("cli.examine.redis._SLOW_MS", math.inf)


def wrong(findings: Iterator[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "problem"]


def test_the_one_that_up_starts_is_fine(settings: Settings) -> None:
    assert wrong(server(settings)) == []
    assert [finding.level for finding in local_server()] == ["ok"]


@pytest.mark.parametrize(
    ("name", "bad", "good", "says"),
    [
        ("maxmemory-policy", "allkeys-lru", "noeviction", "maxmemory-policy is allkeys-lru"),
        ("appendonly", "no", "yes", "appendonly is off"),
        ("maxmemory", "1", "0", "a full Redis refuses writes"),
    ],
)
def test_what_it_must_promise(
    settings: Settings, client: redis.Redis, name: str, bad: str, good: str, says: str
) -> None:
    client.config_set(name, bad)
    try:
        (found,) = wrong(server(settings))
    finally:
        client.config_set(name, good)
        # Redis does not end while it writes its first log of commands.
        while any(
            client.info("persistence")[f"aof_rewrite_{is_so}"]
            for is_so in ("in_progress", "scheduled")
        ):
            time.sleep(0.01)
    assert says in found.says
    assert wrong(server(settings)) == []


def test_a_clock_that_differs_is_named(settings: Settings) -> None:
    (found,) = wrong(server(settings, clock=lambda: time.time() + 10))
    assert (found.about, "NTP" in found.remedy) == ("clock", True)
    assert re.search(r"differ by (9|1\d)\.\d", found.says)
    assert "clock" in [finding.about for finding in server(settings) if finding.level == "ok"]


def test_another_password(own: LocalRedis) -> None:
    for password in ("another", ""):
        url = (
            f"redis://:{password}@127.0.0.1:{own.port}/0"
            if password
            else f"redis://127.0.0.1:{own.port}/0"
        )
        (found,) = wrong(server(Settings(redis_url=url)))
        assert "refuses the password" in found.says
        assert own.password not in found.says


def test_nobody_there() -> None:
    (found,) = wrong(server(Settings(redis_url=f"redis://:secret@127.0.0.1:{free_port()}/0")))
    assert "does not answer" in found.says
    assert "secret" not in found.says


def test_a_user_who_may_not_look(settings: Settings, own: LocalRedis, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "worker", "on", ">password", "~*", "+@all", "-info")
    url = f"redis://worker:password@127.0.0.1:{own.port}/0"
    found = [
        finding
        for finding in server(Settings(redis_url=url), timeout_s=30)
        if finding.level != "ok"
    ]
    assert [finding.level for finding in found] == ["warning"]
    assert "may not run INFO" in found[0].says


def test_no_redis_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("cli.supervise.redis_server.binary_in_wheel", lambda: None)
    (found,) = local_server()
    assert (found.level, "No redis-server 6.2 or newer found" in found.says) == ("problem", True)
