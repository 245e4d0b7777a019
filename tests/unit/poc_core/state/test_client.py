"""A Redis that takes connections and says nothing is an error after one time limit, not four."""

import socket
import time

import pytest
from redis.exceptions import TimeoutError

from poc_core.settings import Settings
from poc_core.state import connect


@pytest.mark.parametrize(("patient", "tries"), [(False, 1), (True, 4)])
def test_a_silent_redis(patient: bool, tries: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with connect(Settings(redis_url=url), patient, timeout_s=0.3) as client:
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                client.ping()
            assert 0.3 * tries <= time.monotonic() - began < 0.3 * tries + 2.5 * (tries > 1) + 0.25
