"""A stack of one vLLM worker, whose rounds, jobs and chat gate a benchmark measures."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from bench.harness.chat_load import one_by_one
from bench.harness.node import API, K_DIM, NodeError, body_of, document, run_job, running
from bench.harness.open_worker import OpenStack
from workers.engines.options import EngineOptions

ANSWER_TOKENS = 64
# Seconds of a round before anything is measured: micro-batches grow to their size.
WARM_UP_S = 4.0
# Seconds between two reads of a counter, and until a counter must have changed.
_LOOK_S, _PATIENCE_S = 0.01, 60.0


@dataclass(frozen=True)
class Work:
    """The engine of a node, and the proofs that it computes."""

    engine: EngineOptions
    seq_len: int
    batch_size: int
    max_step_ms: float
    max_tokens: int | None = None  # of decode proofs; None for artifacts

    def params(self, model: str) -> dict[str, Any]:
        """Returns the parameters of a request."""
        scheme = {"scheme": "decode", "max_tokens": self.max_tokens}
        own = {"k_dim": K_DIM} if self.max_tokens is None else scheme
        return {"model": model, "seq_len": self.seq_len, **own}


@dataclass(frozen=True)
class Mark:
    """The time at which a count changed, and the new count."""

    at: float
    count: float


def rate(first: Mark, last: Mark) -> float:
    return (last.count - first.count) / (last.at - first.at)


class Node:
    """A running stack of one worker."""

    def __init__(self, stack: OpenStack, http: httpx.Client, work: Work, policy: str) -> None:
        self.stack, self.http, self.policy = stack, http, policy
        self.model = stack.model_name
        self._work = work

    def processed(self) -> int:
        """Returns the nonces of the current round."""
        return int(self._status()["stats"]["total_processed"])

    def next_nonces(self) -> Mark:
        """Waits for the round's next progress."""
        return self._next(self.processed)

    def next_busy_s(self) -> Mark:
        """Waits for the worker's next heartbeat; the count is the engine's seconds with proofs."""

        def busy_s() -> float:
            (worker,) = self._status()["workers"]
            return float(worker["stats"]["proof_busy_s"])

        return self._next(busy_s)

    def nonces_per_s(self, seconds: float) -> float:
        """Returns the rate of the current round, measured for about `seconds`."""
        first = self.next_nonces()
        time.sleep(seconds)
        return rate(first, self.next_nonces())

    def compute(self, n: int) -> list[dict[str, Any]]:
        """Computes the first `n` nonces in a job and returns their artifacts."""
        artifacts: list[dict[str, Any]] = self._job(range(n))["artifacts"]
        return artifacts

    def validate(self, artifacts: list[dict[str, Any]]) -> int:
        """Validates the artifacts in a job and returns the number of mismatches."""
        nonces = [artifact["nonce"] for artifact in artifacts]
        return int(self._job(nonces, validation={"artifacts": artifacts})["n_mismatch"])

    @contextmanager
    def round(self) -> Iterator[None]:
        """Runs a round, which has reached its full speed when the body begins."""
        body = self._request(f"block-{time.time()}", batch_size=self._work.batch_size)
        document(self.http.post(f"{API}/init/generate", json=body))
        try:
            self.next_nonces()
            time.sleep(WARM_UP_S)
            yield
        finally:
            document(self.http.post(f"{API}/stop"))
            time.sleep(0.5)  # for micro-batches in progress

    def _status(self) -> dict[str, Any]:
        return document(self.http.get(f"{API}/status"))

    def _request(self, block_hash: str, **more: Any) -> dict[str, Any]:
        params = self._work.params(self.model)
        return body_of(self.model, block_hash=block_hash, **more) | {"params": params}

    def _job(self, nonces: Sequence[int], **more: Any) -> dict[str, Any]:
        return run_job(self.http, self._request("block-of-jobs", nonces=list(nonces), **more))[1]

    def _next(self, count: Callable[[], float]) -> Mark:
        before, ends = count(), time.monotonic() + _PATIENCE_S
        while time.monotonic() < ends:
            now = count()
            if now != before:
                return Mark(time.monotonic(), now)
            time.sleep(_LOOK_S)
        raise NodeError(f"Proofs made no progress for {_PATIENCE_S:g} s.")


@contextmanager
def chat_node(work: Work, policy: str, on_line: Callable[[str, str], None]) -> Iterator[Node]:
    """Starts a node with a chat policy and warms up its chat. `on_line`: as Stack's."""
    env = {"POC_CHAT_POLICY": policy, "POC_MAX_STEP_MS": str(work.max_step_ms)}
    stack = OpenStack(work.engine, max_fast_crashes=0, env=env, on_line=on_line)
    with running(stack) as (_, http):
        node = Node(stack, http, work, policy)
        if policy != "off":
            one_by_one(http, node.model, 5, ANSWER_TOKENS, seed=0)  # kernels, caches, connections
        yield node
