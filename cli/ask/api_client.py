"""A client of the running API, for the commands that submit work to it."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import httpx

from cli.console import UsageError
from poc_core.errors import ProoflineError

NODE = "/api/v1"
PREFIX = f"{NODE}/pow"
TIMEOUT_S = 60.0  # a request of 100,000 nonces with artifacts takes seconds to check
STOP_TIMEOUT_S = 90.0  # of a stop, which waits a minute for engines to end
FIRST_POLL_S = 0.1
MAX_POLL_S = 0.5
POLL_PATIENCE_S = 60.0  # how long the API may be away while we wait or watch: long enough for its restart
FINAL = ("completed", "failed", "cancelled")


class ApiError(ProoflineError):
    """The API refused a request or could not be reached."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # of the answer; None without one

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may be answered a moment later, as over a restart of the API."""
        return self.status is None or self.status >= 500


class JobFailedError(ProoflineError):
    """A job ended without a result."""


class PowClient:
    """Calls of protocol.md, section 5, as the commands need them."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        """`transport` stands in for the network in tests."""
        base = url.rstrip("/").removesuffix(PREFIX)
        try:
            parsed = httpx.URL(base)
        except httpx.InvalidURL as error:
            raise UsageError(f"--url {url!r} cannot be read ({error}).") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UsageError(f"--url must look like http://host:port, not {url!r}.")
        self.base = base
        key = os.environ.get("POC_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S, transport=transport)

    def __enter__(self) -> "PowClient":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        return self._call("GET", f"{PREFIX}/status")

    def submit(self, body: dict[str, Any]) -> str:
        """Queues a job; returns its request_id."""
        answer = self._call("POST", f"{PREFIX}/generate", {**body, "wait": False})
        return str(answer["request_id"])

    def start_round(self, body: dict[str, Any]) -> None:
        self._call("POST", f"{PREFIX}/init/generate", body)

    def stop(self) -> int:
        """Stops the round and cancels all jobs; returns how many jobs."""
        return int(self._call("POST", f"{PREFIX}/stop").get("cancelled_jobs", 0))

    def deployment(self) -> dict[str, Any]:
        """What is deployed and how far each host is."""
        return self._call("GET", f"{NODE}/inference/up/status")

    def deploy(self, body: dict[str, Any]) -> None:
        self._call("POST", f"{NODE}/inference/up/async", body)

    def undeploy(self) -> None:
        """Returns when the engines are gone."""
        self._call("POST", f"{NODE}/stop", timeout_s=STOP_TIMEOUT_S)

    def job(self, request_id: str) -> dict[str, Any]:
        return self._call("GET", self.job_path(request_id))

    def job_path(self, request_id: str) -> str:
        return f"{PREFIX}/generate/{request_id}"

    def only_model(self) -> str:
        """The one model that is served. ApiError when there are none or several, naming them."""
        models = sorted({worker["model"] for worker in self.status().get("workers", [])})
        if not models:
            raise ApiError("No worker serves a model yet; start one, wait for it, or name its model with --model.")
        if len(models) > 1:
            raise UsageError(f"Several models are served; choose one with --model: {', '.join(models)}.")
        return str(models[0])

    def wait_for(self, request_id: str, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
        """Polls until the job ends and returns its result; `on_progress` gets (nonces done, nonces in all).

        An API that is away for less than POLL_PATIENCE_S is waited for. Raises JobFailedError for a job that failed or
        was cancelled.
        """
        pause_s = FIRST_POLL_S
        answered = time.monotonic()
        while True:
            try:
                job = self.job(request_id)
                answered = time.monotonic()
            except ApiError as error:
                if not error.is_temporary or time.monotonic() - answered > POLL_PATIENCE_S:
                    raise
                job = {}
            status = job.get("status")
            if status == "completed":
                return job
            if status in FINAL:
                why = f": {job['error']}" if job.get("error") else ""
                raise JobFailedError(f"Job {request_id} {status if status == 'failed' else 'was cancelled'}{why}")
            if job.get("n_total"):
                on_progress(int(job.get("n_done", 0)), int(job["n_total"]))
            time.sleep(pause_s)
            pause_s = min(MAX_POLL_S, pause_s * 1.3)

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise ApiError(
                f"No answer from {self.base} ({error or type(error).__name__}); is `proofline up` running there? "
                "Another address: --url."
            ) from error
        try:
            document = answer.json()
        except ValueError:
            document = None
        if answer.status_code >= 400:
            detail = document.get("detail") if isinstance(document, dict) else answer.text[:500]
            text = f"{describe_detail(detail)} (HTTP {answer.status_code})"
            raise ApiError(text, answer.status_code)
        if not isinstance(document, dict):
            raise ApiError(f"{self.base}{path} answers something that is not Proofline's; check --url.")
        return document


def describe_detail(detail: Any) -> str:
    """FastAPI's and our own `detail` as one line: a text, a list of field errors, or an object."""
    if isinstance(detail, str):
        return detail
    if isinstance(detail, list):
        problems = []
        for item in detail:
            if isinstance(item, dict) and "msg" in item:
                place = ".".join(str(part) for part in item.get("loc", []) if part != "body")
                problems.append(f"{place}: {item['msg']}" if place else str(item["msg"]))
            else:
                problems.append(json.dumps(item))
        return "; ".join(problems)
    if isinstance(detail, dict):
        message = detail.get("message") or detail.get("error")
        rest = {name: value for name, value in detail.items() if name not in ("message", "error")}
        return f"{message} {json.dumps(rest)}" if message and rest else str(message or json.dumps(rest))
    return "The API gives no reason"
