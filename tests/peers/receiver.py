"""A receiver of callbacks, as moody as a test wants it."""

import contextlib
import json
import ssl
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Payload:
    at: float  # time.time() when it had arrived
    path: str
    body: dict[str, Any]
    answered: int  # HTTP status

    @property
    def payload_id(self) -> str:
        return str(self.body["payload_id"])

    @property
    def number(self) -> int:
        return int(self.payload_id.rpartition("-")[2])

    @property
    def nonces(self) -> list[int]:
        return [artifact["nonce"] for artifact in self.body["artifacts"]]


@dataclass
class Receiver:
    """An HTTP server on loopback that notes what it is sent, as a context manager; may go away."""

    status: int = 200  # what it answers
    delay_s: float = 0.0  # before it answers; set to less, it holds for those that wait too
    talks_nonsense: bool = False  # it takes what comes, and its answer is no HTTP
    tls: ssl.SSLContext | None = None  # it speaks nothing else
    payloads: list[Payload] = field(default_factory=list)  # all, also those answered with an error
    n_unanswered: int = 0  # arrived, and their answer is delayed

    def __post_init__(self) -> None:
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "Receiver":
        self.come_back()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.go_away()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._port}"

    def go_away(self) -> None:
        """Refuses connections from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def come_back(self) -> None:
        """Accepts connections again, on the same port as before."""
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def taken(self, what: str = "/generated") -> list[Payload]:
        """The payloads of a path that were answered 2xx, in the order of their arrival."""
        with self._lock:
            return [
                payload
                for payload in self.payloads
                if payload.path == what and payload.answered < 300
            ]

    def refused(self) -> list[Payload]:
        with self._lock:
            return [payload for payload in self.payloads if payload.answered >= 300]

    def nonces(self) -> list[int]:
        """The nonces of the rounds' payloads taken, in order; those of a repeated payload once."""
        return [nonce for payload in unrepeated(self.round_payloads()) for nonce in payload.nonces]

    def round_payloads(self) -> list[Payload]:
        return [payload for payload in self.taken() if "request_id" not in payload.body]

    def take(self, path: str, body: dict[str, Any]) -> int:
        status, arrived = self.status, time.time()
        with self._lock:
            self.n_unanswered += 1
        while time.time() - arrived < self.delay_s:
            time.sleep(0.02)
        with self._lock:
            self.n_unanswered -= 1
            self.payloads.append(Payload(arrived, path, body, status))
        return status


def unrepeated(payloads: list[Payload]) -> list[Payload]:
    """The payloads without repeats of a payload_id, which must be equal; numbers have no gaps."""
    first: dict[str, Payload] = {}
    for payload in payloads:
        known = first.setdefault(payload.payload_id, payload)
        assert known.body == payload.body, f"{payload.payload_id} came again with other contents"
    numbers = [payload.number for payload in first.values()]
    assert numbers == list(range(len(numbers))), f"payloads are missing or out of order: {numbers}"
    return list(first.values())


def gaps_and_repeats(nonces: list[int], expected: range) -> tuple[list[int], list[int]]:
    """(nonces missing between the first expected and the last come, those twice or unexpected).

    `expected`: the whole sequence.
    """
    counts = Counter(nonces)
    last = max(nonces, default=expected.start - expected.step)
    missing = [
        nonce for nonce in range(expected.start, last + 1, expected.step) if nonce not in counts
    ]
    return missing, [nonce for nonce, n in counts.items() if n > 1 or nonce not in expected]


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a request that hangs must not hold up the test's end
    allow_reuse_address = True


def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status = receiver.take(self.path, body)
            if receiver.talks_nonsense:
                self.wfile.write(b"\x16\x03 thanks for nothing\r\n\r\n")
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # the sender was killed meanwhile
                super().handle()

    return Handler
