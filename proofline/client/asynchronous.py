"""The client for asyncio programs."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from poc_core.answers import NodeState, Status, UpStatus, Versions
from poc_core.schemes.artifact.answers import ArtifactResult, ValidationResult
from proofline.client import calls, exchange
from proofline.client.bodies import Body, as_json
from proofline.client.calls import Call
from proofline.client.errors import ApiError
from proofline.client.retries import Patience

T = TypeVar("T")
OnProgress = Callable[[int, int], None]  # (nonces done, nonces in all)


class AsyncClient:
    """A node's API; one client may be used by several tasks.

    A call that the API asks to repeat (429 and 503 with Retry-After), or that can be repeated
    without harm, is tried again for `patience_s` seconds; `on_wait` gets the error and the seconds
    to wait. A node that has never answered is not waited for: see `wait_ready`.

    `url`: http://host:port, or host:port alone; None takes PROOFLINE_URL of the environment, else
    port 8000 of this machine; UrlError: it cannot be read. `api_key`: None takes POC_API_KEY.
    `transport` stands in for the network in tests. All methods raise ApiError.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        patience_s: float = exchange.PATIENCE_S,
        on_wait: Callable[[ApiError, float], None] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base = exchange.base_url(url)
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._has_answered = False
        self._http = httpx.AsyncClient(
            base_url=self.base, headers=exchange.headers(api_key), transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections; `with` does so at its end."""
        await self._http.aclose()

    async def submit(self, body: Body) -> str:
        """Queues a job; returns its request_id, which `wait` and `cancel` take.

        `body`: GenerateBody, DecodeBody or a dict of the same words; block_height, node_id and
        node_count may be left out for a node alone. ApiError: the body is wrong (422), the model
        cannot compute it (409), or the queue is full (429). Never sent twice, unless the API asks.
        """
        answer = await self.call(calls.submit(body))
        return answer.request_id

    async def wait(
        self, request_id: str, answer: type[T], on_progress: OnProgress | None = None
    ) -> T:
        """Waits for a job's end and returns its result.

        `request_id`: from `submit`, in whatever process. `answer`: the type that the result is read
        as, ArtifactResult, ValidationResult, DecodeResult, a model of yours, or Document for the
        JSON. `on_progress(done, total)`, in nonces: with each look, 0.1 to 0.5 s apart, and last
        with done = total. JobFailedError: the job failed or was cancelled. ApiError: nobody knows
        the job (404), or the API is away for over a minute. Waits as long as the job lasts.
        """
        pause_s = exchange.FIRST_POLL_S
        progress: tuple[int, int] | None = None
        while True:
            job = await self.call(
                calls.job(request_id), patience_s=max(self._patience_s, exchange.POLL_PATIENCE_S)
            )
            if exchange.result_in(job, request_id):
                total = progress[1] if progress else exchange.n_nonces_of(job)
                if on_progress and total:
                    on_progress(total, total)
                return exchange.read_as(answer, job)
            progress = exchange.progress_in(job)
            if on_progress and progress:
                on_progress(*progress)
            await asyncio.sleep(pause_s)
            pause_s = exchange.next_poll_s(pause_s)

    async def run(self, body: Body, answer: type[T], on_progress: OnProgress | None = None) -> T:
        """Queues a job of any scheme and waits for its result: `submit`, then `wait`."""
        return await self.wait(await self.submit(body), answer, on_progress)

    async def generate(self, body: Body, on_progress: OnProgress | None = None) -> ArtifactResult:
        """Has the node compute the artifacts of `body.nonces`, and waits for them.

        `on_progress` and errors: as of `wait` and `submit`. The result's `artifacts` are dicts of
        `nonce` and `vector_b64`, k_dim float16 numbers each; nonces whose state was not finite are
        in `excluded_nonces` instead.
        """
        return await self.run(body, ArtifactResult, on_progress)

    async def validate(
        self,
        body: Body,
        artifacts: Sequence[Mapping[str, Any]],
        stat_test: Body | None = None,
        on_progress: OnProgress | None = None,
    ) -> ValidationResult:
        """Has the node judge artifacts, and waits for the verdict.

        `body`: as it would ask for them; `artifacts`: one for each of its nonces, as `generate`
        returns them. `stat_test`: when they are a fraud; None: the API's own terms. `on_progress`
        and errors: as of `wait` and `submit`. A fraud is no error: see `fraud_detected`.
        """
        return await self.run(
            calls.validation(body, artifacts, stat_test), ValidationResult, on_progress
        )

    async def cancel(self, request_id: str) -> bool:
        """Cancels a job; False: the job had ended before. ApiError 404: nobody knows it."""
        answer = await self.call(calls.cancel(request_id))
        return answer.cancelled

    async def status(self) -> Status:
        """The current round (rates in nonces a second), nonces that wait, and the workers."""
        return await self.call(calls.node_status())

    async def start_round(self, body: Body) -> None:
        """Starts a round, which goes on until `stop`; jobs wait meanwhile.

        `body`: ArtifactRoundBody or a dict, as of `submit`. ApiError: a round runs already or the
        model cannot compute it (409), or the body is wrong (422).
        """
        await self.call(calls.start_round(body))

    async def stop(self) -> int:
        """Stops the round within a micro-batch and cancels the jobs that are queued.

        Returns how many jobs. What is computed is still delivered. No round: no error.
        """
        answer = await self.call(calls.stop())
        return answer.cancelled_jobs

    async def wait_ready(self, timeout_s: float) -> list[str]:
        """Waits for a node that may not even run yet; returns the models that are served.

        `timeout_s`: seconds from now. ApiError: after them, or at once where waiting cannot help,
        such as without a key.
        """
        ends_at = time.monotonic() + timeout_s
        while True:
            try:
                answer = await self.call(calls.ready(), patience_s=0)
                return answer.models
            except ApiError as error:
                if not error.is_temporary or time.monotonic() > ends_at:
                    raise
            await asyncio.sleep(exchange.MAX_POLL_S)

    async def state(self) -> NodeState:
        """Whether the node serves a model, and whether a round runs."""
        return await self.call(calls.state())

    async def versions(self) -> Versions:
        """Proofline's and vLLM's versions."""
        return await self.call(calls.versions())

    async def deployment(self) -> UpStatus:
        """Returns the deployment and each host's progress; `elapsed_seconds` since the request."""
        return await self.call(calls.deployment())

    async def deploy(
        self, model: str, dtype: str = "auto", additional_args: Sequence[str] = ()
    ) -> None:
        """Has all hosts serve a model; returns at once. `deployment` tells their progress.

        `model`: a name on the Hugging Face hub, a shipped model's, or a directory on every host;
        `dtype`: auto, bfloat16, float16 or float32; `additional_args`: words of `vllm serve`.
        Ends the current round. ApiError: an argument is refused (400, 422).
        """
        await self.call(calls.deploy(model, dtype, additional_args))

    async def undeploy(self) -> None:
        """Ends the round and the engines; returns when the engines are gone, within a minute."""
        await self.call(calls.undeploy())

    async def call(self, call: Call[T], *, patience_s: float | None = None) -> T:
        """Sends any call and reads its answer; the other methods are made of this one.

        `patience_s`: seconds for which it may be tried again; None: the client's own. ApiError: a
        refusal (`status`), no answer (`status` is None), or an answer of another kind.
        """
        patience = Patience(self._patience_s if patience_s is None else patience_s)
        while True:
            try:
                return await self._send(call)
            except ApiError as error:
                pause_s = patience.pause_s(
                    error, call.is_repeatable, waits_for_start=self._has_answered
                )
                if self._on_wait:
                    self._on_wait(error, pause_s)
            await asyncio.sleep(pause_s)

    async def _send(self, call: Call[T]) -> T:
        try:
            answer = await self._http.request(
                call.method, call.path, json=as_json(call.body), timeout=call.timeout_s
            )
        except httpx.HTTPError as error:
            raise exchange.no_answer(self.base, error) from error
        self._has_answered = True
        return exchange.read(call, self.base, answer)
