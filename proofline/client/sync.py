"""The client for programs that wait for each answer."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from poc_core.answers import NodeState, Status, UpStatus, Versions
from poc_core.schemes.artifact.answers import ArtifactResult, ValidationResult
from proofline.client import calls, exchange
from proofline.client.calls import Body, Call
from proofline.client.errors import ApiError
from proofline.client.retries import Patience

T = TypeVar("T")
OnProgress = Callable[[int, int], None]  # (nonces done, nonces in all)


class Client:
    """A node's API; one client may be used by several threads.

    A call that the API asks to repeat (429 and 503 with Retry-After), or that can be repeated
    without harm, is tried again for `patience_s` seconds; `on_wait` gets the error and the seconds
    to wait. A node that has never answered is not waited for: see `wait_ready`.

    `url`: None takes PROOFLINE_URL of the environment, else port 8000 of this machine; `api_key`:
    None takes POC_API_KEY. `transport` stands in for the network in tests. Methods raise ApiError.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        patience_s: float = exchange.PATIENCE_S,
        on_wait: Callable[[ApiError, float], None] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base = exchange.base_url(url)
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._has_answered = False
        self._http = httpx.Client(
            base_url=self.base, headers=exchange.headers(api_key), transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, body: Body) -> str:
        """Queues a job; returns its request_id."""
        return self.call(calls.submit(body)).request_id

    def wait(self, request_id: str, answer: type[T], on_progress: OnProgress | None = None) -> T:
        """A job's result as `answer` (a model, or Document for JSON). JobFailedError: none."""
        pause_s = exchange.FIRST_POLL_S
        while True:
            job = self.call(
                calls.job(request_id), patience_s=max(self._patience_s, exchange.POLL_PATIENCE_S)
            )
            if exchange.result_in(job, request_id):
                return exchange.read_as(answer, job)
            progress = exchange.progress_in(job)
            if on_progress and progress:
                on_progress(*progress)
            time.sleep(pause_s)
            pause_s = exchange.next_poll_s(pause_s)

    def run(self, body: Body, answer: type[T], on_progress: OnProgress | None = None) -> T:
        """Queues a job of any scheme and waits for its result."""
        return self.wait(self.submit(body), answer, on_progress)

    def generate(self, body: Body, on_progress: OnProgress | None = None) -> ArtifactResult:
        """The artifacts of given nonces."""
        return self.run(body, ArtifactResult, on_progress)

    def validate(
        self,
        body: Body,
        artifacts: Sequence[Mapping[str, Any]],
        stat_test: Body | None = None,
        on_progress: OnProgress | None = None,
    ) -> ValidationResult:
        """The verdict on artifacts, one for each nonce of the body that asked for them."""
        return self.run(calls.validation(body, artifacts, stat_test), ValidationResult, on_progress)

    def cancel(self, request_id: str) -> bool:
        """Cancels a job; False: the job had ended before."""
        return self.call(calls.cancel(request_id)).cancelled

    def status(self) -> Status:
        """The current round, what waits, and the workers."""
        return self.call(calls.node_status())

    def start_round(self, body: Body) -> None:
        self.call(calls.start_round(body))

    def stop(self) -> int:
        """Stops the round and cancels the jobs that are queued; returns how many jobs."""
        return self.call(calls.stop()).cancelled_jobs

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Waits for a node that may not even run yet; returns the models that are served."""
        ends_at = time.monotonic() + timeout_s
        while True:
            try:
                return self.call(calls.ready(), patience_s=0).models
            except ApiError as error:
                if not error.is_temporary or time.monotonic() > ends_at:
                    raise
            time.sleep(exchange.MAX_POLL_S)

    def state(self) -> NodeState:
        return self.call(calls.state())

    def versions(self) -> Versions:
        return self.call(calls.versions())

    def deployment(self) -> UpStatus:
        """What is deployed, and each host's progress."""
        return self.call(calls.deployment())

    def deploy(self, model: str, dtype: str = "auto", additional_args: Sequence[str] = ()) -> None:
        """Has all hosts serve a model; returns at once. `deployment` tells their progress."""
        self.call(calls.deploy(model, dtype, additional_args))

    def undeploy(self) -> None:
        """Ends the round and the engines; returns when the engines are gone."""
        self.call(calls.undeploy())

    def call(self, call: Call[T], *, patience_s: float | None = None) -> T:
        """Sends any call; the other methods are made of this one."""
        patience = Patience(self._patience_s if patience_s is None else patience_s)
        while True:
            try:
                return self._send(call)
            except ApiError as error:
                pause_s = patience.pause_s(
                    error, call.is_repeatable, waits_for_start=self._has_answered
                )
                if self._on_wait:
                    self._on_wait(error, pause_s)
            time.sleep(pause_s)

    def _send(self, call: Call[T]) -> T:
        try:
            answer = self._http.request(
                call.method, call.path, json=calls.as_json(call.body), timeout=call.timeout_s
            )
        except httpx.HTTPError as error:
            raise exchange.no_answer(self.base, error) from error
        self._has_answered = True
        return exchange.read(call, self.base, answer)
