"""One round through the API, with a receiver for its callbacks, timed as its client sees it."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec

PATH = "/api/v1/pow"

# Seconds after /stop within which everything must have arrived.
_DELIVERY_S = 60.0
# Seconds between two looks at the count.
_LOOK_S = 0.05


class RoundError(ProoflineError):
    """A round of the benchmark did not go as it should."""


@dataclass(frozen=True)
class RoundRun:
    seconds: float  # from the round's start to its stop
    n_nonces: int  # counted when /stop had answered: what was still under way is not
    # Nonce -> vector_b64, of everything that arrived; nonces from 0 without a gap.
    vectors: dict[int, str]
    # Nonces/s from the first progress seen to the last; None: there were not two.
    steady: float | None = None


class Sink:
    """Context manager: an HTTP server that keeps callbacks' bodies, unread while the clock runs."""

    def __init__(self, protocol: str = "HTTP/1.0") -> None:
        """`protocol`: with HTTP/1.1 connections are kept."""
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
        """The artifacts that arrived since the last call."""
        bodies = [json.loads(body) for body in self.bodies]
        self.bodies.clear()
        return {
            artifact["nonce"]: artifact["vector_b64"]
            for body in bodies
            for artifact in body["artifacts"]
        }


def run_round(
    client: httpx.Client, sink: Sink, spec: ProofSpec, model: str, batch_size: int, seconds: float
) -> RoundRun:
    """Runs a round for about `seconds`. RoundError: refused, or not every nonce arrived once."""
    sink.empty()
    body = {
        "block_hash": spec.block_hash,
        "block_height": 1,
        "public_key": spec.public_key,
        "node_id": 0,
        "node_count": 1,
        "batch_size": batch_size,
        "params": {"model": model, "seq_len": spec.seq_len, "k_dim": spec.options["k_dim"]},
        "url": sink.url,
    }
    _document(client.post(f"{PATH}/init/generate", json=body))
    marks = list(_progress(client, time.monotonic() + seconds))
    _document(client.post(f"{PATH}/stop"))
    at_stop = _document(client.get(f"{PATH}/status"))["stats"]
    deadline = time.monotonic() + _DELIVERY_S
    vectors: dict[int, str] = {}
    while True:
        time.sleep(1.0)  # longer than a micro-batch: whatever was under way is counted now
        stats = _document(client.get(f"{PATH}/status"))["stats"]
        vectors |= sink.empty()
        if stats["artifacts_waiting"] == 0 and len(vectors) == stats["total_processed"]:
            break
        if time.monotonic() > deadline:
            raise RoundError(f"{len(vectors)} of {stats['total_processed']} artifacts arrived.")
    if sorted(vectors) != list(range(len(vectors))):
        raise RoundError("The round's nonces have a gap.")
    steady = None
    if len(marks) > 1:
        (began, first), (ended, last) = marks[0], marks[-1]
        steady = (last - first) / (ended - began)
    return RoundRun(at_stop["elapsed_seconds"], at_stop["total_processed"], vectors, steady)


def _progress(client: httpx.Client, until: float) -> Iterator[tuple[float, int]]:
    """The moment of each change of the round's count that was seen, and the count."""
    count = 0
    while time.monotonic() < until:
        now = _document(client.get(f"{PATH}/status"))["stats"]["total_processed"]
        if now != count:
            count = now
            yield time.monotonic(), count
        time.sleep(_LOOK_S)


def _document(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise RoundError(f"The API answers {answer.status_code}: {answer.text[:500]}")
    document: dict[str, Any] = answer.json()
    return document
