"""Both clients against the API itself, in this process, and against rare answers."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from poc_core.records import Lease
from poc_core.state.jobs import JobStore
from proofline.client import (
    ApiError,
    ArtifactParams,
    ArtifactResult,
    ArtifactRoundBody,
    AsyncClient,
    Client,
    Document,
    GenerateBody,
    JobFailedError,
    StatTest,
    calls,
    exchange,
)
from tests.harness.samples import K_DIM, MODEL, complete_batch, known, lease_batch, status_answer

URL = "http://node"
VECTOR = "AAAA" * (2 * K_DIM // 3)
PARAMS = ArtifactParams(model=MODEL, seq_len=64)
ABOUT: dict[str, Any] = {"block_hash": "block", "public_key": "key", "params": PARAMS}
PLACE = {"block_height": 7, "node_id": 0, "node_count": 1}
REQUEST = GenerateBody(nonces=[0, 1, 2], **ABOUT | PLACE)
ROUND = ArtifactRoundBody(**ABOUT | PLACE)
QUEUED = {"status": "queued", "request_id": "job-1", "queued_count": 3}


class Both:
    """Does to a new client of either kind what a test says; the async one's coroutines run to
    their end.
    """

    def __init__(self, kind: str, handler: Callable[[httpx.Request], httpx.Response]) -> None:
        self.is_async = kind == "async"
        self.waited: list[float] = []
        self._transport = httpx.MockTransport(lambda request: again(handler(request)))

    def do(self, *steps: Callable[[Any], Any], patience_s: float = 10.0) -> list[Any]:
        """What each step gave, one after the other on one client."""
        given: dict[str, Any] = {
            "transport": self._transport,
            "patience_s": patience_s,
            "on_wait": self.note,
        }
        if not self.is_async:
            with Client(URL, **given) as client:
                return [step(client) for step in steps]

        async def all_steps() -> list[Any]:
            async with AsyncClient(URL, **given) as client:
                return [await step(client) for step in steps]

        coroutine: Coroutine[Any, Any, list[Any]] = all_steps()
        return asyncio.run(coroutine)

    def note(self, _error: ApiError, pause_s: float) -> None:
        self.waited.append(pause_s)


Make = Callable[..., Both]


@pytest.fixture(params=["sync", "async"])
def both(request: pytest.FixtureRequest) -> Make:
    return lambda handler: Both(request.param, handler)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "FIRST_POLL_S", 0.01)
    monkeypatch.setattr(exchange, "MAX_POLL_S", 0.02)
    monkeypatch.setattr("proofline.client.retries.FIRST_PAUSE_S", 0.001)


def answering(
    *answers: httpx.Response | Exception,
) -> tuple[Callable[[httpx.Request], httpx.Response], list[str]]:
    """A node that gives these answers in turn, and the calls it got."""
    left = iter(answers)
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.path}")
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handler, seen


def again(answer: httpx.Response) -> httpx.Response:
    """A copy: a response belongs to the kind of client that has got it."""
    return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


def ok(document: Any) -> httpx.Response:
    return httpx.Response(200, json=document)


def refused(status: int, retry_after: str | None = "0") -> httpx.Response:
    return httpx.Response(
        status, json={"detail": "no"}, headers={"Retry-After": retry_after} if retry_after else None
    )


def submitted(body: Any, client: Any) -> Any:
    return client.submit(body)


class TestAgainstTheApi:
    @pytest.fixture
    def node(self, client: TestClient, both: Make, serve: Callable[..., Any]) -> Both:
        def forward(request: httpx.Request) -> httpx.Response:
            serve("w1")  # its heart beats, however long a request takes
            answer = client.request(
                request.method,
                request.url.raw_path.decode(),
                content=request.content,
                headers=request.headers,
            )
            return httpx.Response(
                answer.status_code, content=answer.content, headers=answer.headers
            )

        return both(forward)

    @pytest.fixture
    def worker(self, jobs: JobStore) -> Iterator[None]:
        """Computes every job that appears, beside the client that waits."""
        over = threading.Event()

        def work() -> None:
            while not over.wait(0.01):
                for job_id in jobs.active_jobs(MODEL):
                    lease = lease_batch(jobs, job_id, 0, "w1")
                    if isinstance(lease, Lease) and complete_batch(
                        jobs, job_id, 0, [VECTOR for _ in lease.nonces]
                    ):
                        jobs.finish(job_id)

        thread = threading.Thread(target=work)
        thread.start()
        yield
        over.set()
        thread.join()

    @pytest.mark.usefixtures("worker")
    def test_artifacts_are_computed_and_judged(self, node: Both) -> None:
        artifacts = [{"nonce": nonce, "vector_b64": VECTOR} for nonce in (0, 1, 2)]
        forged = [*artifacts[:2], {"nonce": 2, "vector_b64": "forged"}]
        result, honest, fraud = node.do(
            lambda client: client.generate(REQUEST),
            lambda client: client.validate(REQUEST, artifacts),
            lambda client: client.validate(
                REQUEST, forged, StatTest(p_mismatch=0.001, fraud_threshold=0.1)
            ),
        )
        assert result.artifacts == artifacts
        assert result.encoding.k_dim == K_DIM
        assert (honest.n_total, honest.n_mismatch, honest.fraud_detected) == (3, 0, False)
        assert (fraud.mismatch_nonces, fraud.fraud_threshold) == ([2], 0.1)
        assert fraud.fraud_detected is True

    def test_a_job_is_cancelled(self, node: Both) -> None:
        (request_id,) = node.do(lambda client: client.submit(REQUEST))
        assert node.do(*[lambda client: client.cancel(request_id)] * 2) == [True, False]
        with pytest.raises(JobFailedError, match="was cancelled"):
            node.do(lambda client: client.wait(request_id, ArtifactResult))

    def test_a_round_is_started_seen_and_stopped(self, node: Both) -> None:
        started, status, cancelled = node.do(
            lambda client: client.start_round(ROUND),
            lambda client: client.status(),
            lambda client: client.stop(),
        )
        assert (started, cancelled) == (None, 0)
        assert status.state == "GENERATING"
        assert status.config["params"] == {"model": MODEL, "seq_len": 64, "k_dim": K_DIM}
        assert status.stats.outbox.dropped == 0
        assert [(worker.id, worker.info.hidden_size) for worker in status.workers] == [("w1", 128)]

    def test_the_node_is_looked_at(self, node: Both) -> None:
        ready, state, versions, deployment = node.do(
            lambda client: client.wait_ready(timeout_s=1),
            lambda client: client.state(),
            lambda client: client.versions(),
            lambda client: client.deployment(),
        )
        assert ready == [MODEL]
        assert state.poc_status == "IDLE"
        assert versions.vllm_version is None
        assert (deployment.models, deployment.hosts) == ([MODEL], [])

    def test_a_trial_says_neither_a_height_nor_a_place(self, node: Both, jobs: JobStore) -> None:
        bodies = [
            GenerateBody(nonces=[0], **ABOUT),
            {**ABOUT, "nonces": [0], "params": PARAMS.model_dump(exclude_unset=True)},
        ]
        for body in bodies:
            (request_id,) = node.do(partial(submitted, body))
            record = known(jobs.read(request_id))
            request = record.request
            assert (request.block_height, request.node_id, request.node_count) == (0, 0, 1)
        node.do(lambda client: client.start_round(ArtifactRoundBody(**ABOUT)))
        (status,) = node.do(lambda client: client.status())
        assert (status.config["node_id"], status.config["node_count"]) == (0, 1)

    def test_what_the_api_says_of_a_wrong_body_is_the_error(self, node: Both) -> None:
        wrong = REQUEST.model_dump(exclude_unset=True) | {"nonces": [1, 1]}
        said = r"nonces: Nonce 1 is listed twice.*\(HTTP 422\)"
        with pytest.raises(ApiError, match=said) as caught:
            node.do(lambda client: client.submit(wrong))
        assert caught.value.status == 422
        assert not caught.value.is_temporary

    @pytest.mark.parametrize("odd", ["\ud800", float("nan")])
    def test_a_body_that_json_cannot_express_is_an_error_too(self, node: Both, odd: Any) -> None:
        with pytest.raises(ApiError, match="JSON") as caught:
            node.do(lambda client: client.submit(REQUEST.model_dump() | {"block_hash": odd}))
        assert caught.value.status == 422


class TestRetries:
    @pytest.mark.parametrize("status", [429, 503])
    def test_what_is_asked_for_by_retry_after_is_done(self, both: Make, status: int) -> None:
        handler, seen = answering(refused(status), refused(status), ok(QUEUED))
        node = both(handler)
        assert node.do(lambda client: client.submit(REQUEST)) == ["job-1"]
        assert seen == ["POST /api/v1/pow/generate"] * 3
        assert node.waited == [0.001, 0.001]  # FIRST_PAUSE_S, for 0

    def test_what_would_take_longer_than_patience_is_an_error_at_once(self, both: Make) -> None:
        handler, _ = answering(refused(503, "5"))
        node = both(handler)
        with pytest.raises(ApiError) as caught:
            node.do(lambda client: client.deploy("tiny-llama"), patience_s=1)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 5.0)
        assert node.waited == []

    @pytest.mark.parametrize(
        "answer",
        [
            *(refused(429, None), refused(503, None), refused(500), refused(502, None)),
            httpx.ReadError("gone"),
        ],
    )
    def test_a_job_is_never_queued_twice(self, both: Make, answer: Any) -> None:
        handler, seen = answering(answer)
        with pytest.raises(ApiError):
            both(handler).do(lambda client: client.submit(REQUEST))
        assert len(seen) == 1

    def test_a_look_is_repeated_over_a_restart(self, both: Make) -> None:
        status = ok(status_answer([MODEL]))
        lost, restarting = httpx.ReadError("gone"), httpx.ConnectError("refused")
        handler, seen = answering(
            status, lost, restarting, refused(502, None), refused(503, None), status
        )
        looks = both(handler).do(*[lambda client: client.status()] * 2)
        assert [look.workers[0].model for look in looks] == [MODEL, MODEL]
        assert len(seen) == 6

    def test_once_a_node_has_answered_a_job_waits_for_its_restart(self, both: Make) -> None:
        status, away = ok(status_answer([MODEL])), httpx.ConnectError("refused")
        handler, _ = answering(status, away, ok(QUEUED))
        steps = (lambda client: client.status(), lambda client: client.submit(REQUEST))
        assert both(handler).do(*steps)[1] == "job-1"

    def test_an_address_that_never_answered_is_not_waited_for(self, both: Make) -> None:
        handler, seen = answering(httpx.ConnectError("refused"))
        with pytest.raises(ApiError, match=r"No answer from http://node \(refused\)"):
            both(handler).do(lambda client: client.status())
        assert len(seen) == 1

    def test_a_node_that_starts_is_waited_for_until_it_is_ready(self, both: Make) -> None:
        ready = ok({"status": "ready", "models": [MODEL]})
        away = httpx.ConnectError("refused")
        handler, seen = answering(away, refused(503, "5"), refused(429), ready)
        assert both(handler).do(lambda client: client.wait_ready(timeout_s=60)) == [[MODEL]]
        assert len(seen) == 4

    def test_a_node_that_does_not_start_is_an_error(self, both: Make) -> None:
        with pytest.raises(ApiError, match="no"):
            both(lambda _: refused(503, "5")).do(lambda client: client.wait_ready(timeout_s=0))

    @pytest.mark.parametrize(("timeout_s", "most_s"), [(10, 10), (1, 5), (600, 60)])
    def test_a_node_that_accepts_and_is_silent_is_waited_for_no_longer_than_asked(
        self, both: Make, timeout_s: float, most_s: float
    ) -> None:
        def handler(request: httpx.Request) -> httpx.Response:
            allowed.append(request.extensions["timeout"]["read"])
            return ok({"status": "ready", "models": [MODEL]})

        allowed: list[float] = []
        both(handler).do(lambda client: client.wait_ready(timeout_s))
        assert 0.9 * most_s <= allowed[0] <= most_s


class TestWaiting:
    @staticmethod
    def progress(both: Make, *answers: dict[str, Any]) -> tuple[object, list[tuple[int, int]]]:
        """The result of a job that a node answers so about, and the progress until then."""
        told: list[tuple[int, int]] = []
        (result,) = both(answering(*map(ok, answers))[0]).do(
            lambda c: c.wait("job-1", Document, lambda *progress: told.append(progress))
        )
        return result, told

    def test_progress_is_told(self, both: Make) -> None:
        running = [{"status": "running", "n_done": done, "n_total": 3} for done in (0, 2)]
        ended = {"status": "completed", "artifacts": []}
        told = [(0, 3), (2, 3), (3, 3)]
        assert self.progress(both, *running, ended) == (ended, told)

    @pytest.mark.parametrize(
        "result",
        [{"artifacts": [{}, {}], "excluded_nonces": [7]}, {"n_total": 3, "n_mismatch": 0}],
        ids=["artifacts", "a verdict"],
    )
    def test_of_a_job_that_has_ended_before_the_first_look_too(
        self, both: Make, result: dict[str, Any]
    ) -> None:
        assert self.progress(both, {"status": "completed"} | result)[1] == [(3, 3)]

    @pytest.mark.parametrize("odd", [None, "x", [], {}, 1.5])
    def test_progress_of_another_version_is_left_out(self, both: Make, odd: Any) -> None:
        running = {"status": "running", "n_done": odd, "n_total": odd}
        ended = {"status": "completed", "n_total": odd, "artifacts": odd}
        assert self.progress(both, running, ended)[1] == []

    def test_a_failed_job_says_why(self, both: Make) -> None:
        handler, _ = answering(ok({"status": "failed", "error": "the engine was lost"}))
        with pytest.raises(JobFailedError, match="Job job-1 failed: the engine was lost"):
            both(handler).do(lambda client: client.wait("job-1", ArtifactResult))

    @pytest.mark.parametrize("answer", [ok({}), httpx.Response(307, json={"status": "moved"})])
    def test_what_is_no_jobs_answer_is_not_asked_for_ever(
        self, both: Make, answer: httpx.Response
    ) -> None:
        handler, seen = answering(answer, ok({"status": "failed"}))
        with pytest.raises(ApiError, match="not Proofline's; check the url"):
            both(handler).do(lambda client: client.wait("job-1", ArtifactResult))
        assert len(seen) == 1


ODD_LOCS: list[Any] = [None, True, 7, {}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(200, text="hello"), "something that is not Proofline's; check the url"),
        (ok([]), "something that is not Proofline's; check the url"),
        (
            ok(status_answer([]) | {"state": "DANCING"}),
            r"\(state: .*\); is it of another version\?",
        ),
        (httpx.Response(200, text="[" * 100_000), "something that is not Proofline's"),
        *(
            (httpx.Response(400, json={"detail": [{"loc": loc, "msg": "no"}]}), "^no .HTTP 400")
            for loc in ODD_LOCS
        ),
        (httpx.Response(400, json={"error": "why"}), '{"error": ?"why"}'),
        (httpx.Response(400), "The API gives no reason .HTTP 400"),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error(
    both: Make, answer: httpx.Response, message: str
) -> None:
    with pytest.raises(ApiError, match=message):
        both(lambda _: answer).do(lambda client: client.status())


def test_a_call_without_a_method_is_sent_all_the_same(both: Make) -> None:
    handler, seen = answering(ok({"status": "OK", "backends": []}))
    call = calls.Call("GET", "/api/v1/inference/pow/status", Document)
    assert both(handler).do(lambda client: client.call(call)) == [{"status": "OK", "backends": []}]
    assert seen == ["GET /api/v1/inference/pow/status"]
