"""A running stack as its clients see it."""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import httpx

from cli.supervise.stack import Stack
from tests.harness.commands import shown
from tests.harness.samples import MODEL, SPEC, body
from tests.harness.waiting import wait_until
from workers.engines.options import EngineOptions
from workers.engines.synthetic import SyntheticEngine
from workers.pipeline import compute_all

PREFIX = "/api/v1/pow"
TIMEOUT_S = 60.0  # of one request; the machine may be busy with other tests
POLL_S = 0.05
READY_TIMEOUT_S = 600.0


class Node:
    """Submits jobs to a stack and follows them. The API or Redis may be away meanwhile."""

    def __init__(self, stack: Stack, said: Sequence[str] = ()) -> None:
        self.stack = stack
        self.said = said  # what the stack announces
        self.http = httpx.Client(base_url=stack.base_url, timeout=TIMEOUT_S, trust_env=False)
        self._open: set[str] = set()  # jobs that were submitted and are not known to have ended

    def generate(self, nonces: Iterable[int], **changes: Any) -> httpx.Response:
        """POST /generate with a right body, changed (see tests.harness.samples.body)."""
        return self.http.post(f"{PREFIX}/generate", json=body(nonces=list(nonces), **changes))

    def submit(self, nonces: Iterable[int], **changes: Any) -> str:
        """Queues a job and returns its request_id."""
        answer = self.generate(nonces, wait=False, **changes)
        assert answer.status_code == 200, answer.text
        request_id = str(answer.json()["request_id"])
        self._open.add(request_id)
        return request_id

    def get(self, request_id: str) -> httpx.Response:
        return self.http.get(f"{PREFIX}/generate/{request_id}")

    def job(self, request_id: str) -> dict[str, Any]:
        """The job as the API tells it; empty while the API or Redis is away."""
        try:
            answer = self.get(request_id)
        except httpx.TransportError:
            return {}
        if answer.status_code >= 500:
            return {}
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def status(self) -> dict[str, Any]:
        answer = self.http.get(f"{PREFIX}/status")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def cancel(self, request_id: str) -> None:
        """Ends a job, also one under way."""
        answer = self.http.delete(f"{PREFIX}/generate/{request_id}")
        assert answer.status_code == 200, answer.text
        self._open.discard(request_id)

    def cancel_all(self) -> None:
        """Ends every job of `submit` that has not ended yet; the API may be away for a moment."""

        def is_ended(request_id: str) -> bool:
            try:
                answer = self.http.delete(f"{PREFIX}/generate/{request_id}")
            except httpx.TransportError:
                return False
            return answer.status_code in (200, 404)

        for request_id in self._open.copy():
            wait_until(lambda: is_ended(request_id), f"the end of job {request_id}")  # noqa: B023
            self._open.discard(request_id)

    def stop(self) -> httpx.Response:
        return self.http.post(f"{PREFIX}/stop")

    def wait_progress(self, request_id: str, n_done: int = 1, timeout_s: float = 180) -> None:
        """Waits until the job is under way, and fails when it was too quick for what the test
        wants to do to it.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            job = self.job(request_id)
            assert job.get("status") in (None, "queued", "running"), (
                f"over before its middle: {job['status']}"
            )
            if job.get("n_done", 0) >= n_done:
                return
            time.sleep(POLL_S)
        raise AssertionError(f"job {request_id} did not do {n_done} nonces within {timeout_s:g} s")

    def wait_end(self, request_id: str, timeout_s: float = 300) -> dict[str, Any]:
        """The job when it has ended, whichever way."""
        last: dict[str, Any] = {}

        def ended() -> bool:
            nonlocal last
            last = self.job(request_id)
            return last.get("status") in ("completed", "failed", "cancelled")

        wait_until(ended, f"the end of job {request_id}", timeout_s, POLL_S)
        self._open.discard(request_id)
        return last

    def result(self, request_id: str, timeout_s: float = 300) -> dict[str, Any]:
        """The result of a job that must complete."""
        job = self.wait_end(request_id, timeout_s)
        assert job["status"] == "completed", job
        return job

    def wait_whole(self, more: int = 0) -> None:
        """Until the stack's workers and `more` others are ready, and nobody else is known."""

        def is_whole() -> bool:
            pids = self.stack.worker_pids()
            try:
                answer = self.http.get(f"{PREFIX}/status")
            except httpx.TransportError:
                return False
            workers = answer.json()["workers"] if answer.status_code == 200 else []
            ready = {worker["pid"] for worker in workers if worker["state"] == "ready"}
            expected = self.stack.workers + more
            return len(pids) + more == len(ready) == len(workers) == expected and ready >= set(pids)

        wait_until(is_whole, "all workers", READY_TIMEOUT_S)

    def close(self) -> None:
        self.http.close()


def run_node(exits: ExitStack, **options: Any) -> Node:
    """A node with synthetic engines that is ready, until `exits` ends. Its log is shown for a
    test that fails.
    """
    engine = {name: options.pop(name) for name in EngineOptions.model_fields if name in options}
    show, said = shown(), list[str]()

    def announce(message: str) -> None:
        said.append(message)
        show(f"stack    | {message}")

    stack = Stack(
        EngineOptions(**{"model": "tiny-qwen3", "engine": "synthetic"} | engine),
        **{
            "on_line": lambda name, line: show(f"{name:<9}| {line}"),
            "announce": announce,
            **options,
        },
    )
    exits.enter_context(stack)
    stack.wait_ready(READY_TIMEOUT_S)
    node = Node(stack, said)
    exits.callback(node.close)
    return node


def synthetic_artifacts(nonces: Sequence[int]) -> list[dict[str, Any]]:
    """What the synthetic engine answers to the samples' body."""
    vectors = compute_all(
        SyntheticEngine(EngineOptions(model=MODEL, engine="synthetic", synthetic_step_ms=0)),
        SPEC,
        nonces,
    )
    return [
        {"nonce": nonce, "vector_b64": vector}
        for nonce, vector in zip(nonces, vectors, strict=True)
    ]


def tampered(
    artifacts: Sequence[dict[str, Any]], every: int
) -> tuple[list[dict[str, Any]], list[int]]:
    """(a copy in which every `every`-th artifact carries its successor's vector, the nonces so
    changed).
    """
    copy = [dict(artifact) for artifact in artifacts]
    changed = list(range(0, len(copy) - 1, every))
    for index in changed:
        copy[index]["vector_b64"] = artifacts[index + 1]["vector_b64"]
    return copy, [copy[index]["nonce"] for index in changed]
