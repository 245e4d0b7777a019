"""Nodes that benchmarks start, and requests for proofs to their APIs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from cli.supervise.stack import Stack
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec

S = TypeVar("S", bound=Stack)

API = "/api/v1/pow"
MODEL = "tiny-qwen3"  # only a name for synthetic engines, which load no model
K_DIM = 12
READY_TIMEOUT_S = 1200.0  # the first start of a vLLM engine compiles kernels
HTTP_TIMEOUT_S = 60.0
# Seconds without progress after which a job counts as stuck.
_PATIENCE_S = 120.0
# Seconds between two polls of a job: few in its middle, because each poll costs the API CPU time
# that the engine may want, and many near its end, because the wait for a poll counts as overhead.
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 0.5, 0.01


class NodeError(ProoflineError):
    """The node refused a request of the benchmark, or its work did not proceed."""


@contextmanager
def running(stack: S) -> Iterator[tuple[S, httpx.Client]]:
    """Starts the stack; yields the stack when it is ready, and a client of its API."""
    limits = httpx.Limits(max_connections=None)
    with (
        stack,
        httpx.Client(
            base_url=stack.base_url, timeout=HTTP_TIMEOUT_S, limits=limits, trust_env=False
        ) as client,
    ):
        stack.wait_ready(READY_TIMEOUT_S)
        yield stack, client


def spec_of(seq_len: int, block_hash: str) -> ProofSpec:
    """Returns the spec of artifacts as clients request them."""
    options = {"k_dim": K_DIM, "stronger_rng": False}
    return ProofSpec(block_hash=block_hash, public_key="bench", seq_len=seq_len, options=options)


def body_of(
    model: str, seq_len: int = 64, block_hash: str = "bench", **more: Any
) -> dict[str, Any]:
    """Returns the body of a request for artifacts, with further fields (protocol.md, section 5)."""
    return {
        "block_hash": block_hash,
        "block_height": 1,
        "public_key": "bench",
        "node_id": 0,
        "node_count": 1,
        "params": {"model": model, "seq_len": seq_len, "k_dim": K_DIM},
        **more,
    }


def document(answer: httpx.Response) -> dict[str, Any]:
    """Returns the JSON of an answer. NodeError: its status is not 200."""
    if answer.status_code != 200:
        raise NodeError(f"The API answers {answer.status_code}: {answer.text[:500]}")
    found: dict[str, Any] = answer.json()
    return found


def stats_of(client: httpx.Client) -> dict[str, Any]:
    """Returns the counts of the current round."""
    found: dict[str, Any] = document(client.get(f"{API}/status"))["stats"]
    return found


def run_job(client: httpx.Client, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Sends a job and polls until it is completed; returns its seconds and its last document.

    NodeError: the job was refused, failed or stuck, or its artifacts have other nonces.
    """
    began = time.perf_counter()
    request_id = document(client.post(f"{API}/generate", json=body))["request_id"]
    n_done, moved = 0, time.perf_counter()
    while True:
        job = document(client.get(f"{API}/generate/{request_id}"))
        now = time.perf_counter()
        if job["status"] == "completed":
            break
        if job["status"] not in ("queued", "running"):
            raise NodeError(f"The job ended {job['status']}: {job.get('error')}")
        if job["n_done"] != n_done:
            n_done, moved = job["n_done"], now
        elif now - moved > _PATIENCE_S:
            raise NodeError(
                f"No progress for {_PATIENCE_S:g} s at {n_done} of {job['n_total']} nonces."
            )
        time.sleep(pause_s(now - began, n_done, job["n_total"]))
    nonces = [one["nonce"] for one in job.get("artifacts", ())]
    if "validation" not in body and sorted(nonces) != sorted(body["nonces"]):
        raise NodeError(f"The artifacts of {len(body['nonces'])} nonces have other nonces.")
    return now - began, job


def values_of(document: dict[str, Any]) -> dict[int, str]:
    """Returns the vectors (base64) by nonce of a job or a round's payload."""
    return {one["nonce"]: one["vector_b64"] for one in document["artifacts"]}


def pause_s(elapsed_s: float, n_done: int, n_total: int) -> float:
    """Returns the seconds until the next poll: half of the job's expected remaining time."""
    remaining_s = elapsed_s * (n_total - n_done) / n_done if n_done else _LONGEST_PAUSE_S
    return min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, remaining_s / 2))
