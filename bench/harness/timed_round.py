"""One round through the API, with a receiver of its callbacks, timed as its client sees it."""

import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from bench.harness.node import API, NodeError, body_of, document, stats_of, values_of

# Seconds after /stop within which everything must have arrived.
_DELIVERY_S = 60.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class RoundRun:
    """A finished round."""

    seconds: float  # from the round's start to its stop
    n_nonces: int  # that were counted when /stop answered
    vectors: dict[int, str]  # base64 of everything that arrived, by nonce; from nonce 0, no gaps
    # Nonces/s between the first and the last progress; None without two progresses.
    steady: float | None = None


class Sink:
    """An HTTP server that stores the bodies of callbacks, as a context manager."""

    def __init__(self, protocol: str = "HTTP/1.0") -> None:
        """`protocol`: HTTP/1.1 keeps connections open."""
        self.bodies: list[bytes] = []
        self._protocol = protocol

    def __enter__(self) -> "Sink":
        bodies, protocol = self.bodies, self._protocol

        class Handler(BaseHTTPRequestHandler):
            protocol_version = protocol

            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="sink", daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def empty(self) -> dict[int, str]:
        """Returns the vectors by nonce that arrived since the last call."""
        bodies = [json.loads(body) for body in self.bodies]
        self.bodies.clear()
        return {nonce: value for body in bodies for nonce, value in values_of(body).items()}


def run_round(
    client: httpx.Client,
    sink: Sink,
    model: str,
    seq_len: int,
    block_hash: str,
    batch_size: int,
    seconds: float,
) -> RoundRun:
    """Runs a round for about `seconds`. NodeError: refused, or not every nonce arrived once."""
    sink.empty()
    body = body_of(model, seq_len, block_hash, batch_size=batch_size, url=sink.url)
    document(client.post(f"{API}/init/generate", json=body))
    marks = _progress(client, time.monotonic() + seconds)
    document(client.post(f"{API}/stop"))
    at_stop = stats_of(client)
    deadline = time.monotonic() + _DELIVERY_S
    vectors: dict[int, str] = {}
    while True:
        time.sleep(1.0)  # longer than a micro-batch: all nonces in progress are counted then
        stats = stats_of(client)
        vectors |= sink.empty()
        if stats["artifacts_waiting"] == 0 and len(vectors) == stats["total_processed"]:
            break
        if time.monotonic() > deadline:
            raise NodeError(f"{len(vectors)} of {stats['total_processed']} artifacts arrived.")
    if sorted(vectors) != list(range(len(vectors))):
        raise NodeError("The round's nonces have a gap.")
    steady = None
    if len(marks) > 1:
        (began, first), (ended, last) = marks[0], marks[-1]
        steady = (last - first) / (ended - began)
    return RoundRun(at_stop["elapsed_seconds"], at_stop["total_processed"], vectors, steady)


def _progress(client: httpx.Client, until: float) -> list[tuple[float, int]]:
    """Polls the round's count; returns the time of each change and the new count."""
    found: list[tuple[float, int]] = []
    while time.monotonic() < until:
        now = stats_of(client)["total_processed"]
        if now != (found[-1][1] if found else 0):
            found.append((time.monotonic(), now))
        time.sleep(_LOOK_S)
    return found
