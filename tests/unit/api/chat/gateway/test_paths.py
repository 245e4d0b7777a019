"""Paths other than chat: workers publish them, and one engine keeps an answer."""

import http.client
import json
from dataclasses import replace

import httpx
import pytest

from api.routes.services import Services
from poc_core.serving.openai_paths import STORED
from tests.harness.gateway import ANSWER, AUDIO, ELSEWHERE, PUBLISHED, Node, Start, answers, body
from tests.harness.samples import MODEL
from tests.peers.fake_worker import Call, FakeWorker


class TestOtherPaths:
    """Those that the workers' own vLLM says it serves."""

    @pytest.fixture
    def publishing(self, services: Services, start: Start) -> FakeWorker:
        worker = start("w1", answers)
        services.workers.heartbeat(replace(worker.record, chat_paths=PUBLISHED))
        return worker

    @pytest.mark.parametrize("path", ["/v1/score", "/v1/messages", *ELSEWHERE])
    def test_reach_the_worker_that_has_them(
        self, api: httpx.Client, publishing: FakeWorker, path: str
    ) -> None:
        answer = api.post(f"{path}?beta=true", json=body())
        assert (answer.status_code, answer.content) == (200, ANSWER)
        assert publishing.received[0].line == f"POST {path}?beta=true HTTP/1.1"

    def test_may_name_one_thing(self, api: httpx.Client, publishing: FakeWorker) -> None:
        assert api.get("/v1/responses/resp_0a-1").status_code == 200
        assert publishing.received[0].line == "GET /v1/responses/resp_0a-1 HTTP/1.1"

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v1/rerank"),
            ("POST", "/rerank"),
            ("POST", "/v2/embed"),
            ("POST", "/v2/../sleep"),
            ("POST", "/cohere/sleep"),
            ("POST", "/collective_rpc"),
            ("POST", "/v1/systemone"),
            ("POST", "/v1/completions/derender"),
            ("GET", "/v1/score"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/../sleep"),
            ("POST", "/v1/%2e%2e/sleep"),
            ("GET", "/v1/responses/.."),
            ("GET", "/v1/responses/..%2f..%2fsleep"),
            ("GET", "/v1/responses/a%3fb"),
            ("GET", "/v1/responses/a%23b"),
        ],
    )
    def test_that_it_does_not_have_are_404(
        self, api: httpx.Client, publishing: FakeWorker, method: str, path: str
    ) -> None:
        connection = http.client.HTTPConnection(
            api.base_url.host, api.base_url.port or 0, timeout=60
        )
        connection.request(method, path, json.dumps(body()), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 404
        connection.close()
        assert publishing.received == []

    def test_go_to_the_model_that_a_form_names(self, node: Node, publishing: FakeWorker) -> None:
        other = node.start("w2", answers, model="whisper")
        node.services.workers.heartbeat(replace(other.record, chat_paths=PUBLISHED))
        sound = ("a.wav", b"RIFF" * 1000, "audio/wav")
        assert (
            node.api.post(AUDIO, data={"model": "whisper"}, files={"file": sound}).status_code
            == 200
        )
        assert (len(other.received), publishing.received) == (1, [])
        assert node.api.post(AUDIO, files={"file": sound}).status_code == 400
        broken = {"Content-Type": "multipart/form-data"}
        assert node.api.post(AUDIO, content=b"--", headers=broken).status_code == 400

    @pytest.mark.promise(
        "a chat user who calls a vLLM path that the node does not limit", "gets 404"
    )
    def test_that_nothing_bounds_are_404_though_a_worker_of_an_earlier_release_tells_them(
        self, node: Node
    ) -> None:
        worker = node.start("w1", answers)
        told = ("POST /generative_scoring", "POST /v1/new", "POST /v1/score")
        node.services.workers.heartbeat(replace(worker.record, chat_paths=told))
        for path in ("/generative_scoring", "/v1/new"):
            answer = node.api.post(path, json=body(items=["x"] * 1000))
            assert answer.status_code == 404
            assert "POST /v1/score" in answer.json()["error"]["message"]
        assert node.api.post("/v1/score", json=body()).status_code == 200
        assert len(worker.received) == 1


NOT_FOUND = b'{"error":{"message":"Response not found.","type":"x","param":null,"code":404}}'


class TestStoredAnswers:
    """One engine keeps an answer: its id leads there, whichever is asked first."""

    @pytest.fixture
    def both(self, start: Start, services: Services) -> list[FakeWorker]:
        """Of which the second knows resp_1."""

        def knows(call: Call) -> None:
            is_known = "resp_1" in call.received.line or b"resp_1" in call.received.body
            call.answer(
                ANSWER if is_known else NOT_FOUND, "200 OK" if is_known else "404 Not Found"
            )

        workers = [start("w1", lambda call: call.answer(NOT_FOUND, "404 Not Found"))]
        workers.append(start("w2", knows, "another"))
        for worker in workers:
            paths = ("POST /v1/responses", *STORED)
            services.workers.heartbeat(replace(worker.record, chat_paths=paths))
        return workers

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/responses/resp_1"),
            ("GET", "/v1/responses/resp_1?stream=true"),
            ("DELETE", "/v1/responses/resp_1"),
            ("POST", "/v1/responses/resp_1/cancel"),
        ],
    )
    def test_are_found_by_their_id(
        self, api: httpx.Client, both: list[FakeWorker], method: str, path: str
    ) -> None:
        for _ in range(5):
            answer = api.request(method, path)
            assert (answer.status_code, answer.content) == (200, ANSWER)
        unknown = api.request(method, path.replace("resp_1", "resp_2"))
        assert (unknown.status_code, unknown.content) == (404, NOT_FOUND)
        assert both[0].received

    @pytest.mark.parametrize("stream", [False, True])
    def test_are_gone_on_from_where_they_are(
        self, node: Node, both: list[FakeWorker], stream: bool
    ) -> None:
        node.services.workers.heartbeat(replace(both[1].record, model=MODEL))
        for _ in range(5):
            asked = body(input="Hi", previous_response_id="resp_1", stream=stream)
            assert node.api.post("/v1/responses", json=asked).content == ANSWER
        asked = body(input="Hi", previous_response_id="resp_2", stream=stream)
        assert node.api.post("/v1/responses", json=asked).status_code == 404

    def test_others_are_asked_for_once(self, api: httpx.Client, both: list[FakeWorker]) -> None:
        assert api.post("/v1/responses", json=body(input="Hi")).status_code == 404
        assert (len(both[0].received), len(both[1].received)) == (1, 0)
