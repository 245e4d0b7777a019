"""A worker's OpenAI server as the gateway sees it: a socket that answers given bytes, or dies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from poc_core.records import WorkerRecord
from tests.harness.samples import worker_record


@dataclass(frozen=True)
class Received:
    """A request as it came over the wire."""

    line: str  # "POST /v1/completions HTTP/1.1"
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


class Call:
    """One request under way, for the behaviour to answer; returning closes the connection."""

    def __init__(self, connection: socket.socket, received: Received) -> None:
        self.connection = connection
        self.received = received

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.connection.sendall(part)

    def head(self, status: str = "200 OK", *headers: str) -> None:
        self.send("\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode())

    def answer(self, body: bytes, status: str = "200 OK", *headers: str) -> None:
        self.head(
            status, f"Content-Length: {len(body)}", "Content-Type: application/json", *headers
        )
        self.send(body)

    def begin_stream(self) -> None:
        self.head(
            "200 OK", "Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked"
        )

    def chunk(self, *chunks: bytes) -> None:
        for data in chunks:
            self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end_stream(self) -> None:
        self.send(b"0\r\n\r\n")

    def wait_hung_up(self, timeout_s: float = 60.0) -> bool:
        """Whether the gateway closes the connection within that time."""
        self.connection.settimeout(timeout_s)
        try:
            return self.connection.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False


Behaviour = Callable[[Call], None]


class FakeWorker:
    """The server, as a context manager. `behaviour` may be changed at any time."""

    def __init__(self, worker_id: str, behaviour: Behaviour, model: str = "tiny-qwen3") -> None:
        self.behaviour = behaviour
        self.received: list[Received] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.record: WorkerRecord = replace(
            worker_record(worker_id, model),
            port=self._listener.getsockname()[1],
            chat_host="127.0.0.1",
        )

    def __enter__(self) -> FakeWorker:
        self._threads.append(threading.Thread(target=self._accept, daemon=True))
        self._threads[0].start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.die()
        for thread in self._threads:
            thread.join(60)

    def die(self) -> None:
        """Takes no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            received = _read(connection)
            if received is not None:
                self.received.append(received)
                self.behaviour(Call(connection, received))


def _read(connection: socket.socket) -> Received | None:
    raw = b""
    while b"\r\n\r\n" not in raw:
        more = connection.recv(65536)
        if not more:
            return None
        raw += more
    head, _, body = raw.partition(b"\r\n\r\n")
    line, *rest = head.decode("latin-1").split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (entry.partition(":") for entry in rest)]
    length = int(next((value for name, value in headers if name.lower() == "content-length"), "0"))
    while len(body) < length:
        more = connection.recv(65536)
        if not more:
            return None
        body += more
    return Received(line, headers, body)
