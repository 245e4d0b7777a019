"""A stack of one real vLLM worker, its round and its gate as a benchmark watches them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from bench.chat_load import one_by_one
from bench.open_worker import OpenStack
from poc_core.errors import ProoflineError
from workers.engines.options import EngineOptions

API = "/api/v1/pow"
READY_TIMEOUT_S = 600.0  # the first start compiles kernels
ANSWER_TOKENS = 64
# Seconds of a round before anything is measured: micro-batches grow to their size.
WARM_UP_S = 4.0
# Seconds between two looks at a counter whose next change is waited for.
_LOOK_S = 0.01
_PATIENCE_S = 60.0


class NodeError(ProoflineError):
    """The node did not do what the benchmark asked for."""


@dataclass(frozen=True)
class Work:
    """What the node computes and with what."""

    engine: EngineOptions
    seq_len: int
    batch_size: int
    max_step_ms: float


@dataclass(frozen=True)
class Mark:
    """The moment at which a count changed."""

    at: float
    count: float


def rate(first: Mark, last: Mark) -> float:
    return (last.count - first.count) / (last.at - first.at)


class Node:
    """A running stack of one worker."""

    def __init__(self, stack: OpenStack, http: httpx.Client, work: Work) -> None:
        self.stack = stack
        self.model = stack.model_name
        self.http = http
        self._work = work

    def processed(self) -> int:
        """Nonces of the current round."""
        return int(self._status()["stats"]["total_processed"])

    def gate(self) -> dict[str, float]:
        """What the worker's last heartbeat said of its gate."""
        (worker,) = self._status()["workers"]
        stats: dict[str, float] = worker["stats"]
        return stats

    def next_nonces(self) -> Mark:
        """Waits for the round's next progress."""
        return self._next(lambda: self.processed())

    def next_busy_s(self) -> Mark:
        """Waits for the worker's next heartbeat, which tells the seconds that proofs had the engine."""
        return self._next(lambda: self.gate()["proof_busy_s"])

    @contextmanager
    def round(self) -> Iterator[None]:
        """A round that is up to speed when the body runs, and over after it."""
        body = {
            "block_hash": f"block-{time.time()}",
            "block_height": 1,
            "public_key": "bench",
            "node_id": 0,
            "node_count": 1,
            "batch_size": self._work.batch_size,
            "params": {"model": self.model, "seq_len": self._work.seq_len, "k_dim": 12},
        }
        _document(self.http.post(f"{API}/init/generate", json=body))
        try:
            self.next_nonces()
            time.sleep(WARM_UP_S)
            yield
        finally:
            _document(self.http.post(f"{API}/stop"))
            time.sleep(0.5)  # what is under way ends

    def _status(self) -> dict[str, Any]:
        return _document(self.http.get(f"{API}/status"))

    def _next(self, count: Any) -> Mark:
        before, ends = count(), time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends:
            now = count()
            if now != before:
                return Mark(time.monotonic(), now)
            time.sleep(_LOOK_S)
        raise NodeError(f"Proofs made no progress for {_PATIENCE_S:g} s.")


@contextmanager
def chat_node(work: Work, policy: str) -> Iterator[Node]:
    """A stack under a chat policy, warm."""
    stack = OpenStack(
        work.engine,
        max_fast_crashes=0,
        env={"POC_CHAT_POLICY": policy, "POC_MAX_STEP_MS": str(work.max_step_ms)},
    )
    limits = httpx.Limits(max_connections=None)
    with stack, httpx.Client(base_url=stack.base_url, timeout=60, limits=limits, trust_env=False) as http:
        stack.wait_ready(READY_TIMEOUT_S)
        node = Node(stack, http, work)
        if policy != "off":
            one_by_one(http, node.model, 5, ANSWER_TOKENS, seed=0)  # kernels, caches, connections
        yield node


def _document(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise NodeError(f"The API answers {answer.status_code}: {answer.text[:500]}")
    document: dict[str, Any] = answer.json()
    return document
