"""Slow, silent and greedy clients on a real server."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvicorn

from tests.peers.slow_clients import Connect, running
from tests.stacks.served import port_of


@pytest.fixture(scope="module")
def server() -> Iterator[uvicorn.Server]:
    with running() as server:
        yield server


@pytest.fixture
def connect(server: uvicorn.Server) -> Iterator["Connect"]:
    with ExitStack() as opened:
        yield Connect(port_of(server), opened)
