"""How long a Redis is waited for that refuses connections, or takes them and says nothing."""

import contextlib
import socket

import pytest
from redis.exceptions import ConnectionError, TimeoutError

from poc_core.settings import Settings
from poc_core.state.client import connect


@pytest.mark.parametrize(("patient", "tries"), [({"patient": False}, 1), ({}, 4)])
def test_a_silent_redis(patient: dict[str, bool], tries: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        settings = Settings(redis_url=url)
        with connect(settings, **patient, timeout_s=0.3) as client, pytest.raises(TimeoutError):
            client.ping()
        assert taken(silent) == tries  # each try has a connection and a time limit of its own


def test_tries_have_short_pauses_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("redis.retry.sleep", pauses.append)
    client = connect(Settings(redis_url="redis://127.0.0.1:1/0"))
    with client, pytest.raises(ConnectionError, match="refused"):
        client.ping()
    assert pauses
    assert all(0 < pause <= 0.4 for pause in pauses)


def taken(server: socket.socket) -> int:
    """How many connections wait to be taken."""
    server.setblocking(False)
    n = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            n += 1
    return n
