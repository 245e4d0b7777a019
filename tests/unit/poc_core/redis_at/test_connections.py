"""What Sentinels that name no primary are said to have done, and which servers are refused."""

import socket
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError
from redis.sentinel import MasterNotFoundError

from poc_core.redis_at.connections import (
    NoWritesError,
    PrimaryConnection,
    SentinelConnection,
    Sentinels,
    WrongRedisError,
)

UP = {
    "ip": "10.0.0.9",
    "port": 6379,
    "is_master": True,
    "is_sdown": False,
    "is_odown": False,
    "num-other-sentinels": 2,
}
DOWN = UP | {"is_sdown": True}
HOSTS = [("10.0.0.1", 26379), ("10.0.0.2", 26379), ("10.0.0.3", 26379)]
AWAY = ConnectionError("Error 111 connecting to 10.0.0.1:26379. Connection refused.")


def sentinels_that(*say: Any) -> tuple[Sentinels, list[int]]:
    """Sentinels with these answers, and the places of those that were asked."""
    found, asked = Sentinels(HOSTS, {}), list[int]()
    for place, (sentinel, answer) in enumerate(zip(found.sentinels, say, strict=True)):

        def masters(place: int = place, answer: Any = answer) -> Any:
            asked.append(place)
            if isinstance(answer, Exception):
                raise answer
            return answer

        sentinel.sentinel_masters = masters  # type: ignore[method-assign]
    return found, asked


def test_the_first_that_knows_is_asked_first_from_then_on() -> None:
    found, asked = sentinels_that(AWAY, {"node": DOWN}, {"node": UP})
    for _ in range(3):
        assert found.discover_master("node") == ("10.0.0.9", 6379)
    assert asked == [0, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("say", "error", "says"),
    [
        (
            (AWAY, AWAY, AuthenticationError("invalid username-password pair")),
            MasterNotFoundError,
            r"no Sentinel answers \(10.0.0.1:26379: Connection refused; .*"
            r"10.0.0.3:26379: it refuses the url's sentinel_username",
        ),
        (
            (ResponseError("unknown command 'SENTINEL'"),) * 3,
            MasterNotFoundError,
            "unknown command 'SENTINEL'",
        ),
        (
            ({"other": UP}, {"another": UP}, AWAY),
            WrongRedisError,
            r"know no master node \(they know: another, other\)",
        ),
        (({}, AWAY, AWAY), WrongRedisError, r"they know: none"),
        (({"node": DOWN}, {"other": UP}, AWAY), MasterNotFoundError, "node is down"),
    ],
)
def test_why_there_is_no_primary(say: tuple[Any, ...], error: type[Exception], says: str) -> None:
    found, _ = sentinels_that(*say)
    with pytest.raises(error, match=says):
        found.discover_master("node")
    assert issubclass(error, ConnectionError)  # whoever waits for a Redis that is away goes on


class Greeted(PrimaryConnection):
    """A connection to a server that answers this to HELLO, in RESP2 or RESP3."""

    def __init__(self, hello: Any) -> None:
        super().__init__(host="10.0.0.9", protocol=2, driver_info=None)
        self._hello = hello

    def send_command(self, *args: Any, **_: Any) -> None:
        assert args == ("HELLO",)

    def read_response(self, *_: Any, **__: Any) -> Any:
        if isinstance(self._hello, Exception):
            raise self._hello
        return self._hello


@pytest.mark.promise("a Redis server that is not the primary", "gets no work")
@pytest.mark.parametrize(
    ("hello", "error", "says"),
    [
        ([b"mode", b"cluster", b"role", b"master"], WrongRedisError, "is a Redis Cluster, which"),
        ({"mode": "sentinel"}, WrongRedisError, r"10.0.0.9:6379 is a Sentinel; its url is redis\+"),
        ({b"mode": b"standalone", b"role": b"replica"}, NoWritesError, "is a replica and takes no"),
    ],
)
def test_only_a_primary_that_stands_alone_will_do(
    hello: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Greeted(hello).on_connect_check_health()


@pytest.mark.parametrize(
    "hello",
    [
        [b"server", b"redis", b"mode", b"standalone", b"role", b"master"],
        ResponseError("unknown command 'HELLO'"),
        [],
    ],
)
def test_what_is_like_a_primary_will_do(hello: Any) -> None:
    Greeted(hello).on_connect_check_health()


class Told:
    """A pool whose Sentinels name this primary."""

    is_master, check_connection, service_name = True, False, "node"

    def get_master_address(self) -> tuple[str, int]:
        return "10.0.0.9", 6379


def test_a_command_that_is_tried_again_asks_the_sentinels_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = socket.socketpair()
    with here, there:
        connection = SentinelConnection(connection_pool=Told(), host="10.0.0.1", port=6379)
        asked: list[tuple[str, int]] = []

        def connect_to(address: tuple[str, int]) -> None:
            asked.append(address)
            monkeypatch.setattr(connection, "_sock", here)

        monkeypatch.setattr(connection, "connect_to", connect_to)
        monkeypatch.setattr(
            connection, "connect_check_health", lambda **_: asked.append(("old", 0))
        )
        connection.send_packed_command([b"PING"])
        connection.send_packed_command([b"PING"])
        assert asked == [("10.0.0.9", 6379)]
        assert there.recv(100) == b"PINGPING"
