"""One job through the API, timed as its client sees it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec

PATH = "/api/v1/pow/generate"
TIMEOUT_S = 60.0

# Seconds between two looks at the job. Each look costs the API CPU time that the engine may want,
# so they are rare; near the end the wait for a look would count as overhead, so they are frequent.
_LONGEST_PAUSE_S = 0.5
_SHORTEST_PAUSE_S = 0.01

# Seconds without progress after which the job is given up.
_PATIENCE_S = 120.0


class JobError(ProoflineError):
    """A job of the benchmark did not end as it should."""


@dataclass(frozen=True)
class JobRun:
    seconds: float  # from the first byte of the POST to the answer that says completed
    post_s: float  # of that, until the API had accepted the job
    finish_s: float  # of that, after the look that saw the last nonce done, or nearly so
    artifacts: list[dict[str, Any]]


def body_of(spec: ProofSpec, model: str, nonces: Sequence[int], batch_size: int) -> dict[str, Any]:
    """The request for a job with `spec`'s numbers (protocol.md, section 5)."""
    return {
        "block_hash": spec.block_hash,
        "block_height": 1,
        "public_key": spec.public_key,
        "node_id": 0,
        "node_count": 1,
        "nonces": list(nonces),
        "batch_size": batch_size,
        "params": {"model": model, "seq_len": spec.seq_len, "k_dim": spec.options["k_dim"]},
    }


def run_job(client: httpx.Client, body: dict[str, Any]) -> JobRun:
    """Sends the job and polls until it is done. JobError: refused, failed, stuck, nonces amiss."""
    began = time.perf_counter()
    request_id = _document(client.post(PATH, json=body))["request_id"]
    accepted = time.perf_counter()
    n_seen, moved, looked = 0, accepted, accepted
    while True:
        job = _document(client.get(f"{PATH}/{request_id}"))
        now = time.perf_counter()
        if job["status"] == "completed":
            break
        if job["status"] not in ("queued", "running"):
            raise JobError(f"The job ended {job['status']}: {job.get('error')}")
        if job["n_done"] != n_seen:
            n_seen, moved = job["n_done"], now
        elif now - moved > _PATIENCE_S:
            raise JobError(
                f"No progress for {_PATIENCE_S:g} s at {n_seen} of {job['n_total']} nonces."
            )
        looked = now
        time.sleep(pause_s(now - began, n_seen, job["n_total"]))
    if sorted(artifact["nonce"] for artifact in job["artifacts"]) != sorted(body["nonces"]):
        raise JobError(
            f"{len(job['artifacts'])} artifacts came back for {len(body['nonces'])} nonces."
        )
    return JobRun(now - began, accepted - began, now - looked, job["artifacts"])


def pause_s(elapsed_s: float, n_done: int, n_total: int) -> float:
    """Half of the time that the rest should take."""
    remaining_s = elapsed_s * (n_total - n_done) / n_done if n_done else _LONGEST_PAUSE_S
    return min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, remaining_s / 2))


def _document(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise JobError(f"The API answers {answer.status_code}: {answer.text[:500]}")
    document: dict[str, Any] = answer.json()
    return document
