"""A Redis that takes connections and says nothing is an error after one time limit, not four."""

import contextlib
import socket

import pytest
from redis.exceptions import TimeoutError

from poc_core.settings import Settings
from poc_core.state.client import connect


@pytest.mark.parametrize(("patient", "tries"), [(False, 1), (True, 4)])
def test_a_silent_redis(patient: bool, tries: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        settings = Settings(redis_url=url)
        with connect(settings, patient, timeout_s=0.3) as client, pytest.raises(TimeoutError):
            client.ping()
        assert taken(silent) == tries  # each try has a connection and a time limit of its own


def taken(server: socket.socket) -> int:
    """How many connections wait to be taken."""
    server.setblocking(False)
    n = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            n += 1
    return n
