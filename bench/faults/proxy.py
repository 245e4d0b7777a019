"""A TCP proxy on loopback that delays, blocks or closes connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Literal

Mood = Literal["pass", "delay", "hang", "halve"]

_CHUNK = 65536
_LOOK_S = 0.05


class Proxy:
    """A proxy from `port` to `target`, as a context manager; `mood` determines what it does."""

    def __init__(self, target: tuple[str, int], delay_s: float = 0.05) -> None:
        self.mood: Mood = "pass"
        self.delay_s = delay_s
        self._target = target
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._server.getsockname()[1]
        self._closed = False

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._closed = True
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Closes all connections; new connections are still accepted."""
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            _end(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _address = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(_CHUNK):
                if self.mood == "delay":
                    time.sleep(self.delay_s)
                while self.mood == "hang" and not self._closed:
                    time.sleep(_LOOK_S)
                if self.mood == "halve" and len(data) > 1:
                    sink.sendall(data[: len(data) // 2])
                    break
                sink.sendall(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open -= {source, sink}
            _end(source)
            _end(sink)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
