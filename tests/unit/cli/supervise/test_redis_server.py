"""Waiting for a Redis that somebody else runs."""

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, RedisError, ResponseError

from cli.supervise.redis_server import RedisServerError, wait_for_redis

URL = "redis://127.0.0.1:1/0"
BUSY = ResponseError("BUSY Redis is busy running a script.")


def test_a_redis_that_refuses_for_a_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[RedisError] = [BUSY, ConnectionError("refused")]

    def ping(_: Redis) -> bool:
        if errors:
            raise errors.pop()
        return True

    monkeypatch.setattr(Redis, "ping", ping)
    wait_for_redis(URL)
    assert not errors


def test_a_redis_that_goes_on_refusing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def ping(_: Redis) -> bool:
        raise BUSY

    monkeypatch.setattr(Redis, "ping", ping)
    with pytest.raises(RedisServerError, match="BUSY"):
        wait_for_redis(URL, 0.1)
