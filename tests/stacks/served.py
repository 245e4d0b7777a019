"""An application on a real server in this process: in-process clients do not see others leave."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.harness.waiting import wait_until

PATIENCE_S = 150.0


@contextmanager
def served(app: Any, **options: Any) -> Iterator[uvicorn.Server]:
    """A server that has started, on a port of its own. `options`: uvicorn's, beside these."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server", PATIENCE_S)
        yield server
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def port_of(server: uvicorn.Server) -> int:
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port


def url_of(server: uvicorn.Server) -> str:
    return f"http://127.0.0.1:{port_of(server)}"
