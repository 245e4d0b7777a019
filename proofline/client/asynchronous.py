"""The client for asyncio programs."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import httpx

from poc_core import answers
from poc_core.schemes.artifact.answers import ArtifactResult, ValidationResult
from proofline.client import calls, exchange
from proofline.client.bodies import Body, as_json
from proofline.client.calls import Call
from proofline.client.errors import ApiError
from proofline.client.retries import Patience

T = TypeVar("T")
OnProgress = Callable[[int, int], None]  # (nonces done, all nonces)


class AsyncClient:
    """A client of one node's API. It can be shared by several tasks.

    A call is retried for `patience_s` seconds if the API requests a retry (429 or 503 with
    Retry-After), or if repeating the call is safe. `on_wait` is called before each retry, with the
    error and the seconds until the retry. Calls to a url at which nothing has ever answered fail at
    once, except `wait_ready`.

    `url`: http://host:port or host:port; by default PROOFLINE_URL, or port 8000 of this machine. An
    invalid url raises UrlError. `api_key`: by default POC_API_KEY. `transport`: replaces the
    network in tests. All methods that send a call raise ApiError.
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
            base_url=self.base,
            headers=exchange.headers(api_key),
            transport=transport,
            mounts=exchange.WITHOUT_PROXY,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the client's connections. The end of a `with` block does the same."""
        await self._http.aclose()

    async def submit(self, body: Body) -> str:
        """Queues a job, and returns its request_id for `wait` and `cancel`.

        `body`: GenerateBody, DecodeBody or a dict with the same fields; a single node may omit
        block_height, node_id and node_count. ApiError if the body is invalid (422), if the model
        cannot compute the job (409), or if the queue is full (429). The job is sent once, unless
        the API requests a retry.
        """
        answer = await self.call(calls.submit(body))
        return answer.request_id

    async def wait(
        self, request_id: str, answer: type[T], on_progress: OnProgress | None = None
    ) -> T:
        """Waits until a job has ended, without a time limit. Returns the job's result.

        `request_id`: returned by `submit`, in this or another process. `answer`: the type of the
        result, such as ArtifactResult, DecodeResult, your own model, or Document for plain JSON.
        `on_progress(done, total)`: called with numbers of nonces after each poll (every 0.1 to 0.5
        s), and at the end. JobFailedError if the job failed or was cancelled. ApiError if the job
        is unknown (404), or if the API is unavailable for over a minute.
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
        """Queues a job of any scheme, and waits for its result (see `submit` and `wait`)."""
        return await self.wait(await self.submit(body), answer, on_progress)

    async def generate(self, body: Body, on_progress: OnProgress | None = None) -> ArtifactResult:
        """Computes artifacts on the node, and waits for the result (see `submit` and `wait`).

        `artifacts` are dicts with `nonce` and `vector_b64` (k_dim float16 numbers in base64),
        `excluded_nonces` are the nonces whose hidden state was not finite.
        """
        return await self.run(body, ArtifactResult, on_progress)

    async def validate(
        self,
        body: Body,
        artifacts: Sequence[Mapping[str, Any]],
        stat_test: Body | None = None,
        on_progress: OnProgress | None = None,
    ) -> ValidationResult:
        """Validates artifacts on the node, and waits for the verdict (see `submit` and `wait`).

        `body`: the body of a job that computes the artifacts. `artifacts`: one for each nonce, as
        `generate` returns them. `stat_test`: the criteria for fraud; None means the API's defaults.
        Fraud raises no error: `fraud_detected` of the result is then True.
        """
        return await self.run(
            calls.validation(body, artifacts, stat_test), ValidationResult, on_progress
        )

    async def cancel(self, request_id: str) -> bool:
        """Cancels a job. Returns False if the job has ended. Raises ApiError (404) if the job is
        unknown.
        """
        answer = await self.call(calls.cancel(request_id))
        return answer.cancelled

    async def status(self) -> answers.Status:
        """Returns the round with its rates (nonces per second), queued nonces, and workers."""
        return await self.call(calls.status(answers.Status))

    async def start_round(self, body: Body) -> None:
        """Starts a round, which runs until `stop`. Jobs for the same model wait during the round.

        `body`: ArtifactRoundBody or a dict with the same fields, see `submit`. ApiError if a round
        is running or the model cannot compute this round (409), or if the body is invalid (422).
        """
        await self.call(calls.start_round(body))

    async def stop(self) -> int:
        """Stops the round, if any, and cancels queued jobs. Returns the number of cancelled jobs.

        Workers finish their current micro-batch. Computed values are still delivered.
        """
        answer = await self.call(calls.STOP)
        return answer.cancelled_jobs

    async def wait_ready(self, timeout_s: float) -> list[str]:
        """Waits until the node is ready, even if it has not been started yet. Returns its models.

        ApiError after `timeout_s`, or at once if waiting cannot help, such as without an API key.
        """
        ends_at = time.monotonic() + timeout_s
        while True:
            try:
                answer = await self.call(calls.ready(ends_at - time.monotonic()), patience_s=0)
                return answer.models
            except ApiError as error:
                if not error.is_temporary or time.monotonic() > ends_at:
                    raise
            await asyncio.sleep(exchange.MAX_POLL_S)

    async def state(self) -> answers.NodeState:
        """Returns whether the node serves a model, and whether a round is running."""
        return await self.call(calls.STATE)

    async def versions(self) -> answers.Versions:
        """Returns Proofline's and vLLM's versions."""
        return await self.call(calls.VERSIONS)

    async def deployment(self) -> answers.UpStatus:
        """Returns the state of the deployment, and the progress of each host."""
        return await self.call(calls.DEPLOYMENT)

    async def deploy(
        self, model: str, dtype: str = "auto", additional_args: Sequence[str] = ()
    ) -> None:
        """Deploys a model on all hosts, and returns at once (see `deployment`). Ends the round.

        `model`: a name on the Hugging Face hub, a shipped model's name, or a directory on each
        host. `dtype`: auto, bfloat16, float16 or float32. `additional_args`: arguments of `vllm
        serve`. ApiError if an argument is refused (400, 422).
        """
        await self.call(calls.deploy(model, dtype, additional_args))

    async def undeploy(self) -> None:
        """Ends the round and stops the engines. Waits at most a minute for the engines to stop."""
        await self.call(calls.UNDEPLOY)

    async def call(self, call: Call[T], *, patience_s: float | None = None) -> T:
        """Sends a call, and returns its answer. All other methods use this method.

        `patience_s`: seconds for retries; None means the client's default. Raises ApiError if the
        API refuses the call, does not answer, or sends an unexpected answer. The error's `status`
        is the HTTP status; None without an answer.
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
        except ValueError as error:  # NaN, or half of a surrogate pair
            raise exchange.no_json(error) from error
        self._has_answered = True
        return exchange.read(call, self.base, answer)
