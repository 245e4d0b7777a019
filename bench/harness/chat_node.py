"""A stack of one real vLLM worker, its round and its gate as a benchmark watches them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from bench.harness.chat_load import one_by_one
from bench.harness.open_worker import OpenStack
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
    max_tokens: int | None = None  # of decode proofs; None: vectors

    def params(self, model: str) -> dict[str, Any]:
        """The parameters of a request."""
        if self.max_tokens is None:
            return {"model": model, "seq_len": self.seq_len, "k_dim": 12}
        return {
            "model": model,
            "seq_len": self.seq_len,
            "scheme": "decode",
            "max_tokens": self.max_tokens,
        }


@dataclass(frozen=True)
class Mark:
    """The moment at which a count changed."""

    at: float
    count: float


def rate(first: Mark, last: Mark) -> float:
    return (last.count - first.count) / (last.at - first.at)


class Node:
    """A running stack of one worker."""

    def __init__(self, stack: OpenStack, http: httpx.Client, work: Work, policy: str) -> None:
        self.stack = stack
        self.policy = policy
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
        """Waits for the next heartbeat, which tells the seconds that proofs had the engine."""
        return self._next(lambda: self.gate()["proof_busy_s"])

    def nonces_per_s(self, seconds: float) -> float:
        """Rate of the current round, measured for about `seconds`."""
        first = self.next_nonces()
        time.sleep(seconds)
        return rate(first, self.next_nonces())

    def compute(self, n: int) -> list[dict[str, Any]]:
        """Artifacts of a job."""
        artifacts: list[dict[str, Any]] = self._ended_job(self._body(range(n)))["artifacts"]
        return artifacts

    def validate(self, artifacts: list[dict[str, Any]]) -> int:
        """Mismatches of a validation."""
        nonces = [artifact["nonce"] for artifact in artifacts]
        return int(
            self._ended_job(self._body(nonces) | {"validation": {"artifacts": artifacts}})[
                "n_mismatch"
            ]
        )

    @contextmanager
    def round(self) -> Iterator[None]:
        """A round that is up to speed when the body runs, and over after it."""
        body = self._request(f"block-{time.time()}") | {"batch_size": self._work.batch_size}
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

    def _request(self, block_hash: str) -> dict[str, Any]:
        return {
            "block_hash": block_hash,
            "block_height": 1,
            "public_key": "bench",
            "node_id": 0,
            "node_count": 1,
            "params": self._work.params(self.model),
        }

    def _body(self, nonces: Sequence[int]) -> dict[str, Any]:
        return self._request("block-of-jobs") | {"nonces": list(nonces)}

    def _ended_job(self, body: dict[str, Any]) -> dict[str, Any]:
        job = _document(self.http.post(f"{API}/generate", json=body))
        while job["status"] != "completed":
            if job["status"] not in ("queued", "running"):
                raise NodeError(f"The job ended {job['status']}: {job.get('error')}")
            time.sleep(0.1)
            job = _document(self.http.get(f"{API}/generate/{job['request_id']}"))
        return job

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
    with (
        stack,
        httpx.Client(base_url=stack.base_url, timeout=60, limits=limits, trust_env=False) as http,
    ):
        stack.wait_ready(READY_TIMEOUT_S)
        node = Node(stack, http, work, policy)
        if policy != "off":
            one_by_one(http, node.model, 5, ANSWER_TOKENS, seed=0)  # kernels, caches, connections
        yield node


def _document(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise NodeError(f"The API answers {answer.status_code}: {answer.text[:500]}")
    document: dict[str, Any] = answer.json()
    return document
