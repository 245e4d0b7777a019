"""The gateway chooses a worker for each request, and answers 503 without one."""

import threading
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from api.chat.chat_workers import ChatWorkers
from api.chat.gateway import Gateway
from api.routes.services import Services
from poc_core.records import ModelInfo
from poc_core.serving.deployments import Deployment
from poc_core.state.registry import WorkerRegistry
from tests.harness.gateway import (
    ANSWER,
    CHAT,
    Node,
    Start,
    answers,
    body,
    hangs_up,
    loses_its_engine,
)
from tests.harness.samples import MODEL, worker_record
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import Call

MODEL_PATHS = (
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/score",
    "/v1/score",
)


class TestChoice:
    @pytest.mark.parametrize(
        "prepare",
        [
            lambda start, _: start("w1", hangs_up, model="other"),
            lambda _, services: services.workers.heartbeat(worker_record("w0", state="starting")),
            lambda start, _: start("w1", answers).die(),
            lambda start, _: start("w1", loses_its_engine),
            lambda start, _: start("w1", lambda call: call.answer(ANSWER, "999 What")),
        ],
        ids=[
            *("of another model", "that still loads", "that is gone", "whose engine is lost"),
            "whose status is none of HTTP",
        ],
    )
    def test_passes_a_worker_over(
        self,
        api: httpx.Client,
        start: Start,
        services: Services,
        prepare: Callable[[Start, Services], object],
    ) -> None:
        prepare(start, services)
        start("w2", answers)
        assert api.post(CHAT, json=body()).content == ANSWER

    def test_goes_to_the_worker_that_said_it_has_least_chat(self, node: Node) -> None:
        busy, idle = (
            node.start("w1", answers, chat_active=3),
            node.start("w2", answers, chat_active=1),
        )
        node.chat()
        assert (len(busy.received), len(idle.received)) == (0, 1)

    def test_a_conversation_stays_with_its_worker(self, node: Node) -> None:
        workers = [node.start(name, answers) for name in ("w1", "w2")]
        messages = [{"role": "user", "content": "Tell me of the sea. " * 100}]
        node.chat(messages=messages)
        (used,) = (worker for worker in workers if worker.received)
        node.services.workers.heartbeat(replace(used.record, stats={"chat_active": 5}))
        node.services.gateway.workers = ChatWorkers(node.services.workers, 0.0)
        node.chat(messages=messages)
        assert len(used.received) == 2

    def test_own_requests_count_at_once(self, api: httpx.Client, start: Start) -> None:
        release = threading.Event()

        def slow(call: Call) -> None:
            release.wait(60)
            call.answer(ANSWER)

        workers = [start(f"w{index}", slow) for index in range(3)]
        threads = [
            threading.Thread(target=api.post, args=(CHAT,), kwargs={"json": body()})
            for _ in range(6)
        ]
        for n, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda: sum(len(worker.received) for worker in workers) == n)  # noqa: B023
        assert [len(worker.received) for worker in workers] == [2, 2, 2]
        release.set()
        for thread in threads:
            thread.join(60)

    @pytest.mark.parametrize("name", [None, ""])
    def test_request_without_model_goes_to_the_only_one(self, node: Node, name: str | None) -> None:
        node.start("w1", answers)
        assert node.chat(name).content == ANSWER

    @pytest.mark.parametrize("name", [None, ""])
    def test_request_without_model_among_several_is_400(self, node: Node, name: str | None) -> None:
        node.start("w1", answers)
        node.start("w2", answers, model="other")
        answer = node.chat(name)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "Name a model: other, tiny-qwen3."

    def test_unknown_model_is_404_and_lists_those_served(self, node: Node) -> None:
        node.start("w1", answers)
        answer = node.chat("nope")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["message"] == "The model `nope` is not served here; use one of tiny-qwen3."
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)

    def test_a_long_name_is_cut_in_the_message(self, node: Node) -> None:
        node.start("w1", answers)
        assert len(node.chat("x" * 100_000).json()["error"]["message"]) < 300

    def test_worker_that_has_just_come_is_found_at_once(self, node: Node) -> None:
        node.services.gateway.workers = ChatWorkers(node.services.workers, cache_s=60)
        node.start("w1", answers)
        assert node.chat().status_code == 200
        node.start("w2", answers, model="other")
        assert node.chat("other").content == ANSWER

    def test_model_whose_workers_are_away_is_503(self, node: Node) -> None:
        node.services.workers.heartbeat(worker_record("w1"))  # known, but without a chat server
        answer = node.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["code"] == 503

    @pytest.mark.parametrize("path", MODEL_PATHS)
    @pytest.mark.parametrize("model", [None, MODEL])
    def test_no_worker_at_all_is_503(self, api: httpx.Client, path: str, model: str | None) -> None:
        answer = api.post(path, json=body(model))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")

    @pytest.mark.parametrize("path", MODEL_PATHS)
    def test_any_name_is_503_while_a_model_loads(self, node: Node, path: str) -> None:
        """It may be the one that loads, by a name that is not known yet."""
        node.start("w1", answers)
        assert node.api.post(path, json=body("nope")).status_code == 404
        node.services.workers.heartbeat(worker_record("w2", "another", state="starting"))
        answer = node.api.post(path, json=body("nope"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")

    def test_so_it_is_while_its_deployment_starts(self, node: Node) -> None:
        node.start("w1", answers)
        node.services.deployments.deploy_first(Deployment(model="another"), "host")
        assert node.chat("another").status_code == 503

    def test_a_model_that_becomes_ready_at_that_moment_is_503(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def then_ready(registry: WorkerRegistry) -> dict[str, ModelInfo]:
            found = known(registry)
            registry.heartbeat(worker_record("w2", "another"))
            return found

        node.start("w1", answers)
        known = WorkerRegistry.known_models
        monkeypatch.setattr(WorkerRegistry, "known_models", then_ready)
        node.services.workers.heartbeat(worker_record("w2", "another", state="starting"))
        assert node.chat("another").status_code == 503

    @pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/embed"])
    def test_a_model_without_embeddings_says_so(self, node: Node, path: str) -> None:
        worker = node.start("w1", answers)
        node.services.workers.heartbeat(
            replace(worker.record, chat_paths=("POST /v1/completions",))
        )
        answer = node.api.post(path, json=body())
        assert answer.status_code == 404
        assert "`tiny-qwen3` makes no embeddings" in answer.json()["error"]["message"]
        assert worker.received == []


@pytest.mark.parametrize("host", ["10.0.0.5:9000", "xn--a", "999.1.1.1"])
def test_a_worker_whose_host_is_none_is_passed_over(node: Node, host: str) -> None:
    """POC_CHAT_ADVERTISE_HOST of one host of several has a mistake."""
    node.start("w2", answers)
    wrong = worker_record("w1")
    node.services.workers.heartbeat(replace(wrong, port=1, chat_host=host))
    assert {node.chat().status_code for _ in range(3)} == {200}
    assert node.api.get("/v1/models").status_code == 200


def test_by_load_keeps_the_order_among_equals(services: Services) -> None:
    records = [worker_record(f"w{index}") for index in range(3)]
    assert Gateway(services.gateway.workers, services.chats).by_load(records) == records
