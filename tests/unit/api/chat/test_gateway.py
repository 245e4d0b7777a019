"""The OpenAI gateway over real sockets, before workers that answer, refuse or die."""

import contextlib
import gzip
import http.client
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import fakeredis
import httpx
import pytest
from anyio import to_thread
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic_core import from_json

from api.app import create_app
from api.chat.chat_workers import ChatWorkers
from api.chat.fields import fields_of
from api.chat.gateway import Gateway
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.records import ENGINE_LOST_HEADER, GATEWAY_CLIENT_HEADER, GATEWAY_SALT_HEADER
from poc_core.serving.deployments import Deployment
from poc_core.serving.openai_paths import STORED, USUAL
from poc_core.settings import Settings
from poc_core.state import registry
from poc_core.state.history import CHATS, FAILED, FIRST_TOKEN
from tests.harness.samples import MODEL, RecordingDispatcher, known, worker_record
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import Behaviour, Call, FakeWorker
from tests.stacks.served import served, url_of

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
# vLLM's own bytes, with odd spacing and non-ASCII text, must come through as they are.
ANSWER = '{"id":"x",  "choices":[{"message":{"content":"été – 海"}}]}\n'.encode()
EVENTS = [
    f'data: {{"choices":[{{"delta":{{"content":"{word} "}}}}]}}\n\n'.encode()
    for word in ("one", "é", "海")
]
DONE = b"data: [DONE]\n\n"

MAX_BODY_BYTES = 200_000

Start = Callable[..., FakeWorker]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    settings = Settings(max_body_bytes=MAX_BODY_BYTES, worker_ttl_s=120)
    services = Services(settings, fakeredis.FakeRedis(), cast(Dispatcher, RecordingDispatcher()))
    return create_app(services=services)


@pytest.fixture(autouse=True)
def services(app: FastAPI) -> Services:
    """The services of the API, which know of no worker yet."""
    services: Services = app.state.services
    services.redis.flushall()
    for histogram in (services.chats.first_token, services.chats.whole):
        histogram.clear()
    services.gateway.workers = ChatWorkers(services.workers, registry.CHAT_MEMORY_S)
    return services


@pytest.fixture(scope="module")
def api(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the API on a real server: an in-process one would not see clients hang up."""
    with (
        served(app) as server,
        httpx.Client(base_url=url_of(server), timeout=60, trust_env=False) as client,
    ):
        yield client


@pytest.fixture
def start(services: Services) -> Iterator[Start]:
    """Starts and registers a worker: start("w1", behaviour, model=..., stats=...)."""
    with contextlib.ExitStack() as stack:

        def start(
            worker_id: str, behaviour: Behaviour, model: str = MODEL, **stats: Any
        ) -> FakeWorker:
            worker = stack.enter_context(FakeWorker(worker_id, behaviour, model))
            services.workers.heartbeat(replace(worker.record, stats=stats))
            return worker

        yield start


@dataclass
class Node:
    """The API, its services, and how its workers are started."""

    api: httpx.Client
    services: Services
    start: Start

    def chat(self, model: str | None = MODEL, **more: Any) -> httpx.Response:
        return self.api.post(CHAT, json=body(model, **more))


@pytest.fixture
def node(api: httpx.Client, services: Services, start: Start) -> Node:
    return Node(api, services, start)


def body(model: str | None = MODEL, **more: Any) -> dict[str, Any]:
    return ({} if model is None else {"model": model}) | {"messages": []} | more


def answers(call: Call) -> None:
    call.answer(ANSWER)


def streams(call: Call) -> None:
    call.begin_stream()
    call.chunk(*EVENTS, DONE)
    call.end_stream()


def hangs_up(call: Call) -> None:
    return


def loses_its_engine(call: Call) -> None:
    call.answer(b"{}", "503 Service Unavailable", f"{ENGINE_LOST_HEADER}: 1")


AUDIO = "/v1/audio/transcriptions"
ELSEWHERE = ("/score", "/pooling", "/v2/rerank", "/cohere/v2/chat")
PUBLISHED = (
    *USUAL,
    *(f"POST {path}" for path in ("/v1/score", "/v1/messages", AUDIO, *ELSEWHERE)),
    "GET /v1/responses/{response_id}",
)


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

    def test_without_any_worker_are_503(self, api: httpx.Client) -> None:
        assert api.post("/v1/score", json=body()).status_code == 503


class TestPassing:
    def test_request_reaches_the_worker_as_it_came(self, api: httpx.Client, start: Start) -> None:
        worker = start("w1", answers)
        sent = ' {"model" : "tiny-qwen3", "messages":[], "unknown":"é" }'.encode()
        headers = {
            "Authorization": "Bearer key",
            "X-Request-Id": "r-1",
            "Content-Type": "application/json",
        }
        assert api.post(f"{CHAT}?a=1&b=%20", content=sent, headers=headers).status_code == 200
        (received,) = worker.received
        assert received.line == f"POST {CHAT}?a=1&b=%20 HTTP/1.1"
        assert received.body == sent
        assert received.values("authorization") == ["Bearer key"]
        assert received.values("x-request-id") == ["r-1"]
        assert received.values("content-length") == [str(len(sent))]

    def test_no_header_is_added_but_the_connections_own(self, node: Node) -> None:
        worker = node.start("w1", answers)
        connection = http.client.HTTPConnection(node.api.base_url.host, node.api.base_url.port)
        connection.putrequest("POST", CHAT, skip_accept_encoding=True)
        sent = json.dumps(body()).encode()
        connection.putheader("Content-Length", str(len(sent)))
        connection.putheader("Content-Type", "application/json")
        connection.endheaders(sent)
        assert connection.getresponse().read() == ANSWER
        connection.close()
        assert {name.lower() for name, _ in worker.received[0].headers} == {
            "host",
            "content-length",
            "content-type",
            GATEWAY_CLIENT_HEADER,
        }

    def test_a_worker_is_told_clients_apart_and_not_who_they_are(self, node: Node) -> None:
        worker = node.start("w1", answers)
        for claimed in ("somebody", "else"):
            headers = {GATEWAY_CLIENT_HEADER: claimed, **JSON}
            assert (
                node.api.post(CHAT, content=json.dumps(body()), headers=headers).status_code == 200
            )
        told = [received.values(GATEWAY_CLIENT_HEADER) for received in worker.received]
        assert told[0] == told[1]
        ((client,), _) = told
        assert re.fullmatch("[0-9a-f]{16}", client)

    def test_body_in_chunks_arrives_whole(self, api: httpx.Client, start: Start) -> None:
        worker = start("w1", answers)
        sent = json.dumps(body()).encode()
        assert api.post(CHAT, content=iter([sent[:5], sent[5:]]), headers=JSON).status_code == 200
        assert worker.received[0].body == sent
        assert worker.received[0].values("transfer-encoding") == []

    def test_headers_of_one_connection_stay_there(self, api: httpx.Client, start: Start) -> None:
        """RFC 9110, 7.6.1."""
        hop = {
            "Keep-Alive": "timeout=5",
            "Proxy-Authorization": "Basic cHc=",
            "TE": "trailers",
            "Trailer": "Expires",
            "Upgrade": "h2c",
            "Proxy-Authenticate": "Basic",
        }
        worker = start(
            "w1", lambda call: call.answer(ANSWER, "200 OK", *[f"{k}: {v}" for k, v in hop.items()])
        )
        answer = api.post(CHAT, json=body(), headers=hop | {"Connection": "Keep-Alive"})
        assert answer.content == ANSWER
        names = {name.lower() for name in hop} | {"connection"}
        assert {name.lower() for name, _ in worker.received[0].headers} & names == set()
        assert set(answer.headers) & names == set()

    def test_answer_comes_back_byte_for_byte_with_its_headers(self, node: Node) -> None:
        node.start(
            "w1",
            lambda call: call.answer(
                ANSWER, "200 OK", "X-Request-Id: abc", "Set-Cookie: a", "Set-Cookie: b"
            ),
        )
        answer = node.chat()
        assert answer.content == ANSWER
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["content-length"] == str(len(ANSWER))
        assert answer.headers["x-request-id"] == "abc"
        assert answer.headers.get_list("set-cookie") == ["a", "b"]
        assert len(answer.headers.get_list("date")) == 1

    @pytest.mark.parametrize(
        ("head", "content"),
        [
            (["400 Bad Request"], b'{"error":{"message":"max_tokens is too large","code":400}}'),
            (["503 Service Unavailable", "Retry-After: 30"], b"{}"),  # in an exclusive round
            (["200 OK"], b""),
        ],
        ids=["an error", "a refusal", "nothing"],
    )
    def test_answer_of_the_worker_is_the_clients(
        self, node: Node, head: list[str], content: bytes
    ) -> None:
        node.start("w1", lambda call: call.answer(content, *head))
        answer = node.chat()
        assert (f"{answer.status_code} {answer.reason_phrase}", answer.content) == (
            head[0],
            content,
        )
        assert answer.headers.get("retry-after") == ("30" if len(head) > 1 else None)

    @pytest.mark.parametrize(
        "path",
        ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"],
    )
    def test_every_path_is_the_workers(self, api: httpx.Client, start: Start, path: str) -> None:
        worker = start("w1", answers)
        assert api.post(path, json=body()).content == ANSWER
        assert worker.received[0].line == f"POST {path} HTTP/1.1"


class TestCachesOfClients:
    """Each client's chats have a prefix cache of their own, by a salt."""

    @pytest.fixture(autouse=True)
    def salts(self, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(app.state, "salts_caches", True)

    @pytest.fixture
    def salt_of(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
        worker = node.start("w1", answers)

        def salt_of(client: str, path: str = CHAT, **more: Any) -> str:
            monkeypatch.setattr("api.routes.openai.client_of", lambda _: client)
            assert node.api.post(path, json=body(**more)).status_code == 200
            told = json.loads(worker.received[-1].body)["cache_salt"]
            assert worker.received[-1].values(GATEWAY_SALT_HEADER) == [told]
            return str(told)

        return salt_of

    def test_are_their_own_and_the_same_with_each_request(
        self, salt_of: Callable[..., str]
    ) -> None:
        mine = {salt_of("key a", max_tokens=n) for n in (1, 2)}
        assert len(mine) == 1
        assert salt_of("key b") not in mine
        assert re.fullmatch("[0-9a-f]{32}", mine.pop())

    def test_keep_apart_what_a_client_keeps_apart_and_nobody_can_name_anothers(
        self, salt_of: Callable[..., str]
    ) -> None:
        plain = salt_of("key a")
        own = [salt_of("key a", cache_salt=salt) for salt in ("x", "y", plain)]
        others = [salt_of("key b", cache_salt=salt) for salt in ("x", plain, own[0])]
        assert len({plain, *own, *others}) == 7
        assert salt_of("key a", cache_salt="x") == own[0]
        assert salt_of("key a", cache_salt=None) == plain

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/embeddings"])
    def test_are_those_of_other_paths_too(self, salt_of: Callable[..., str], path: str) -> None:
        assert salt_of("key a", path) != salt_of("key b", path)

    def test_leave_the_body_as_it_came_but_for_the_salt(self, node: Node) -> None:
        worker = node.start("w1", answers)
        sent = b' {"model" : "tiny-qwen3", "cache_salt": "x", "messages":[], "n":1.0 } \n'
        assert node.api.post(CHAT, content=sent, headers=JSON).status_code == 200
        assert worker.received[0].body.startswith(sent.rstrip()[:-1] + b',"cache_salt":"')
        assert json.loads(worker.received[0].body).pop("cache_salt") != "x"
        assert node.api.post("/tokenize", content=sent, headers=JSON).status_code == 200
        assert worker.received[1].body == sent

    def test_keep_conversations_where_their_beginning_is(self, node: Node) -> None:
        workers = [node.start(f"w{n}", answers) for n in range(3)]
        messages = [{"role": "user", "content": "x" * 2000}]
        for n in range(4):
            assert node.chat(messages=messages * (n + 1)).status_code == 200
        assert sorted(len(worker.received) for worker in workers) == [0, 0, 4]

    def test_refuse_a_salt_that_is_no_text(self, api: httpx.Client, start: Start) -> None:
        start("w1", answers)
        answer = api.post(CHAT, json=body(cache_salt=5))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


class TestStreams:
    def test_events_come_byte_for_byte(self, api: httpx.Client, start: Start) -> None:
        start("w1", streams)
        answer = api.post(CHAT, json=body(stream=True))
        assert answer.content == b"".join(EVENTS) + DONE
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"

    def test_every_event_comes_as_soon_as_it_is_there(self, node: Node) -> None:
        seen = [threading.Event() for _ in EVENTS]

        def waits_for_the_client(call: Call) -> None:
            call.begin_stream()
            for event, was_seen in zip(EVENTS, seen, strict=True):
                call.chunk(event)
                assert was_seen.wait(60)
            call.end_stream()

        node.start("w1", waits_for_the_client)
        with node.api.stream("POST", CHAT, json=body(stream=True)) as answer:
            n = 0
            for chunk in answer.iter_raw():
                assert chunk == EVENTS[n]
                seen[n].set()
                n += 1
        assert n == len(EVENTS)

    def test_events_cut_in_pieces_come_whole(self, api: httpx.Client, start: Start) -> None:
        def cuts(call: Call) -> None:
            call.begin_stream()
            for byte in b"".join(EVENTS) + b"data: no newline at the end":
                call.chunk(bytes([byte]))
            call.end_stream()

        start("w1", cuts)
        assert (
            api.post(CHAT, json=body()).content == b"".join(EVENTS) + b"data: no newline at the end"
        )


MODEL_PATHS = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/score")


WRONG = b'data: {"error": {"message": "Grammar error", "type": "BadRequestError", "code": 400}}\n\n'
NOT_FOUND = b'{"error":{"message":"Response not found.","type":"x","param":null,"code":404}}'
EARLY = b'event: response.created\ndata: {"type": "response.created"}\n\n'


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


class TestStreamsThatFail:
    """Before their first token: by their own status, as whole answers."""

    @pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
    @pytest.mark.parametrize("before", [b"", b": waits\n\n", EARLY, EARLY.replace(b"\n", b"\r\n")])
    def test_have_the_status_of_their_first_event(
        self, node: Node, path: str, before: bytes
    ) -> None:
        def fails(call: Call) -> None:
            call.begin_stream()
            for part in (before[:20], before[20:], WRONG[:9], WRONG[9:], DONE):
                if part:
                    call.chunk(part)
            call.end_stream()

        worker = node.start("w1", fails)
        node.services.workers.heartbeat(replace(worker.record, chat_paths=PUBLISHED))
        answer = node.api.post(path, json=body(stream=True))
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
        assert answer.json()["error"]["message"] == "Grammar error"

    def test_as_anthropics_events_say_it(self, node: Node) -> None:
        error = {"type": "error", "error": {"type": "internal_error", "message": "oh"}}

        def fails(call: Call) -> None:
            call.begin_stream()
            call.chunk(b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n")
            call.end_stream()

        worker = node.start("w1", fails)
        node.services.workers.heartbeat(replace(worker.record, chat_paths=PUBLISHED))
        answer = node.api.post("/v1/messages", json=body(stream=True))
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "oh")

    def test_later_end_with_an_event(self, api: httpx.Client, start: Start) -> None:
        def fails(call: Call) -> None:
            call.begin_stream()
            call.chunk(EVENTS[0], WRONG, DONE)
            call.end_stream()

        start("w1", fails)
        answer = api.post(CHAT, json=body(stream=True))
        assert (answer.status_code, answer.content) == (200, EVENTS[0] + WRONG + DONE)

    def test_and_whose_worker_dies_are_tried_elsewhere(self, node: Node) -> None:
        def dies(call: Call) -> None:
            call.begin_stream()
            call.chunk(EARLY)

        node.start("w1", dies)
        node.start("w2", streams)
        answer = node.api.post("/v1/responses", json=body(stream=True))
        assert answer.content == b"".join(EVENTS) + DONE


class TestStreamsThatWait:
    """Their clients get empty lines, which keep proxies from closing the connection."""

    @pytest.fixture(autouse=True)
    def often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("api.chat.gateway.KEEP_ALIVE_S", 0.1)

    def test_begin_before_their_worker_answers(self, api: httpx.Client, start: Start) -> None:
        seen = threading.Event()

        def waits(call: Call) -> None:
            assert seen.wait(60)
            streams(call)

        start("w1", waits)
        with api.stream("POST", CHAT, json=body(stream=True)) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            parts = answer.iter_raw()
            assert (next(parts), next(parts)) == (b"\n", b"\n")
            seen.set()
            assert b"".join(parts).lstrip(b"\n") == b"".join(EVENTS) + DONE

    def test_get_them_between_events_and_never_within(self, node: Node) -> None:
        seen = threading.Event()

        def waits(call: Call) -> None:
            call.begin_stream()
            call.chunk(EVENTS[0])
            assert seen.wait(60)
            call.chunk(b"event: x\n")
            time.sleep(0.5)
            call.chunk(b"data: y\n\n")
            call.end_stream()

        node.start("w1", waits)
        with node.api.stream("POST", CHAT, json=body(stream=True)) as answer:
            parts = (part for part in answer.iter_raw())
            first = next(part for part in parts if part != b"\n")  # they may come before it too
            assert (first, next(parts)) == (EVENTS[0], b"\n")
            seen.set()
            assert b"".join(parts).strip(b"\n") == b"event: x\ndata: y"

    def test_are_tried_elsewhere_until_their_first_token(self, node: Node) -> None:
        seen = threading.Event()
        node.start("w1", lambda call: seen.wait(60))
        node.start("w2", streams)
        with node.api.stream("POST", CHAT, json=body(stream=True)) as answer:
            parts = answer.iter_raw()
            assert next(parts) == b"\n"
            seen.set()
            assert b"".join(parts).lstrip(b"\n") == b"".join(EVENTS) + DONE

    @pytest.mark.parametrize(
        ("fails", "message"),
        [
            (lambda call: call.answer(b'{"detail": "no"}', "400 Bad Request"), "no"),
            (hangs_up, "No worker could answer; try again in some seconds."),
        ],
        ids=["refused", "dead"],
    )
    @pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
    def test_end_with_an_error_event_where_that_comes_late(
        self, node: Node, fails: Behaviour, message: str, path: str
    ) -> None:
        seen = threading.Event()

        def fails_late(call: Call) -> None:
            assert seen.wait(60)
            fails(call)

        worker = node.start("w1", fails_late)
        node.services.workers.heartbeat(replace(worker.record, chat_paths=PUBLISHED))
        with node.api.stream("POST", path, json=body(stream=True)) as answer:
            parts = answer.iter_raw()
            assert next(parts) == b"\n"
            seen.set()
            name, _, data = b"".join(parts).strip(b"\n").rpartition(b"data: ")
        assert json.loads(data)["error"]["message"] == message
        assert name == (b"event: error\n" if path == "/v1/messages" else b"")

    def test_whole_answers_get_none(self, api: httpx.Client, start: Start) -> None:
        def slow(call: Call) -> None:
            time.sleep(0.5)
            call.answer(ANSWER)

        start("w1", slow)
        assert api.post(CHAT, json=body(stream=False)).content == ANSWER

    def test_openais_client_reads_them(self, api: httpx.Client, start: Start) -> None:
        import openai

        def slow(call: Call) -> None:
            time.sleep(0.5)
            call.begin_stream()
            for event in (*EVENTS, DONE):
                call.chunk(event)
                time.sleep(0.3)
            call.end_stream()

        start("w1", slow)
        client = openai.OpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model=MODEL, messages=[], stream=True)
        texts = [event.choices[0].delta.content for event in stream]
        assert texts == ["one ", "é ", "海 "]


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

    def test_request_without_model_goes_to_the_only_one(self, node: Node) -> None:
        node.start("w1", answers)
        assert node.chat(None).content == ANSWER

    def test_request_without_model_among_several_is_400(self, node: Node) -> None:
        node.start("w1", answers)
        node.start("w2", answers, model="other")
        answer = node.chat(None)
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


class TestBadBodies:
    @pytest.mark.parametrize(
        ("sent", "why"),
        [
            (b"{", "no JSON: EOF while parsing an object at line 1 column 1"),
            (b'{"model": "x",\n "messages": [}', "no JSON: expected value at line 2 column 15"),
            (b"a=b", "no JSON: expected value at line 1 column 1"),
            (b'{"messages": [{"content": "\\ud83d"}]}', "column 34, which is half of a surrogate"),
            (b'{"x": "\\udc00"}', "surrogate in hex escape at line 1 column"),
            (b'{"model": "\xff\xfe"}', "not UTF-8: byte 0xff at position 11"),
            ('{"model": "x"}'.encode("utf-16"), "not UTF-8: byte 0xff at position 0"),
            ('{"model": "\ud800"}'.encode("utf-8", "surrogatepass"), "byte 0xed at position 11"),
            (
                gzip.compress(b"{}", mtime=0),
                "The body is gzip; say so with the header Content-Encoding: gzip.",
            ),
            (b'\xef\xbb\xbf{"model": "x"}', "begins with a byte order mark"),
            ('{"model": "x"}'.encode("utf-16-le"), "is UTF-16 or UTF-32"),
            ('{"model": "x"}'.encode("utf-32-be"), "is UTF-16 or UTF-32"),
            (b"[]", "must be a JSON object"),
            (b'"text"', "must be a JSON object"),
            (b'{"model": 5}', "`model` must be a string"),
            (b'{"messages": null}', "messages must be a list"),
            (b"[" * 100_000, "recursion limit exceeded at line 1 column"),
        ],
    )
    def test_what_cannot_be_read_is_400_that_says_why(
        self, node: Node, sent: bytes, why: str
    ) -> None:
        worker = node.start("w1", answers)
        answer = node.api.post(CHAT, content=sent, headers=JSON)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert why in error["message"]
        assert worker.received == []

    @pytest.mark.parametrize("encoding", ["gzip", "GZIP"])
    def test_compressed_body_reaches_the_worker_as_it_was_before(
        self, node: Node, encoding: str
    ) -> None:
        worker = node.start("w1", answers)
        sent = json.dumps(body()).encode()
        headers = JSON | {"Content-Encoding": encoding}
        assert node.api.post(CHAT, content=gzip.compress(sent), headers=headers).status_code == 200
        (received,) = worker.received
        assert received.body == sent
        assert received.values("content-encoding") == []

    @pytest.mark.parametrize(
        ("path", "more", "param"),
        [
            (CHAT, {"n": 10_000, "max_tokens": 1 << 20}, "max_tokens"),
            (CHAT, {"structured_outputs": True}, "structured_outputs"),
            (CHAT, {"tools": [5]}, "tools"),
            (CHAT, {"messages": "x"}, "messages"),
            (CHAT, {"messages": None}, "messages"),
            ("/tokenize", {"prompt": "x" * 150_000}, "prompt"),
            ("/v1/responses", {"input": [{}] * 30_000}, "input"),
            (
                CHAT,
                {"chat_template_kwargs": {f"{n}": 1 for n in range(10_000)}},
                "chat_template_kwargs",
            ),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_what_vllm_would_break_on_or_be_held_by_is_400_by_its_field(
        self, node: Node, path: str, more: dict[str, Any], param: str
    ) -> None:
        worker = node.start("w1", answers)
        answer = node.api.post(path, json=body() | more)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert worker.received == []

    def test_a_body_of_nothing_but_short_items_is_refused_unparsed(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("poc_core.chat_bounds.MAX_COMMAS", 1000)
        monkeypatch.setattr("api.chat.fields.fields_of", lambda *_: pytest.fail("parsed"))
        worker = node.start("w1", answers)
        answer = node.chat(items=[1] * 2000)
        assert answer.status_code == 413
        assert "split the request" in answer.json()["error"]["message"]
        assert worker.received == []

    def test_other_requests_go_on_after_each_large_body(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on, steps = threading.Event(), []

        def parses(content_type: str, body: bytes) -> dict[str, Any]:
            if len(body) > 1000:
                steps.append("parsed")
            return fields_of(content_type, body)

        async def pauses(_: float) -> None:
            steps.append("paused")
            await to_thread.run_sync(go_on.wait)

        monkeypatch.setattr("api.chat.prefixes.MAX_BODY", 1000)
        monkeypatch.setattr("api.chat.fields.fields_of", parses)
        monkeypatch.setattr("api.routes.openai.sleep", pauses)
        node.start("w1", answers)
        with ThreadPoolExecutor() as pool:
            large = [pool.submit(node.chat, padding="x" * 2000) for _ in range(2)]
            try:
                wait_until(lambda: "paused" in steps, "the first pause")
                assert node.chat().status_code == 200
            finally:
                go_on.set()
            assert [one.result().status_code for one in large] == [200, 200]
        assert steps == ["parsed", "paused"] * 2

    def test_more_known_tokens_than_any_context_holds_are_refused_unparsed(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = node.start("w1", answers)
        info = known(worker_record("w1").info)
        context = info.max_seq_len
        monkeypatch.setattr("api.chat.fields.fields_of", lambda *_: pytest.fail("parsed"))
        answer = node.chat(enforced_tokens=[{"token": "9"}] * (context + 1))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], f"context of {context}" in error["message"]) == (None, True)
        assert worker.received == []

    @pytest.mark.parametrize("chunked", [False, True])
    def test_body_over_the_limit_is_413(self, node: Node, chunked: bool) -> None:
        worker = node.start("w1", answers)
        sent = json.dumps(body(padding="x" * MAX_BODY_BYTES)).encode()
        with contextlib.suppress(httpx.WriteError):  # refused before all was sent
            answer = node.api.post(CHAT, content=iter([sent]) if chunked else sent, headers=JSON)
            assert answer.status_code == 413
        assert worker.received == []


class TestDeaths:
    @pytest.mark.parametrize("stream", [False, True])
    def test_worker_that_dies_before_its_first_byte_is_replaced(
        self, node: Node, stream: bool
    ) -> None:
        def dies_after_the_head(call: Call) -> None:
            if stream:
                call.begin_stream()

        first, second = (
            node.start("w1", dies_after_the_head),
            node.start("w2", streams if stream else answers),
        )
        answer = node.chat(stream=stream)
        assert answer.status_code == 200
        assert answer.content == (b"".join(EVENTS) + DONE if stream else ANSWER)
        assert first.received[0].body == second.received[0].body

    @pytest.mark.parametrize("fails", [hangs_up, loses_its_engine])
    def test_worker_that_failed_once_is_not_asked_again_from_memory(
        self, node: Node, fails: Any
    ) -> None:
        node.services.gateway.workers = ChatWorkers(node.services.workers, cache_s=60)
        failed, other = node.start("w1", fails), node.start("w2", answers)
        for _ in range(3):
            assert node.chat().content == ANSWER
        assert (len(failed.received), len(other.received)) == (1, 3)

    def test_the_only_worker_is_asked_again_though_it_failed_once(self, node: Node) -> None:
        node.services.gateway.workers = ChatWorkers(node.services.workers, cache_s=60)
        worker = node.start("w1", hangs_up)
        assert node.chat().status_code == 503
        worker.behaviour = answers
        assert node.chat().content == ANSWER

    @pytest.mark.promise(
        "a revoked host", "gets no chat after `revoke` returns, whatever the host left in Redis"
    )
    def test_one_that_is_revoked_while_another_fails_is_not_asked(self, node: Node) -> None:
        def revoked_meanwhile(_: Call) -> None:
            node.services.workers.remove("w2")
            time.sleep(2 * registry.CHAT_MEMORY_S)

        node.start("w1", revoked_meanwhile)
        revoked = node.start("w2", answers, chat_active=9)
        assert node.chat().status_code == 503
        assert revoked.received == []

    def test_when_all_die_it_is_503(self, api: httpx.Client, start: Start) -> None:
        start("w1", hangs_up)
        start("w2", hangs_up)
        answer = api.post(CHAT, json=body())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["type"] == "service_unavailable"

    def test_a_stream_of_deep_json_is_forwarded(self, node: Node) -> None:
        deep = b"data: " + b"[" * 5000 + b"\n\n"

        def streams_deep(call: Call) -> None:
            call.begin_stream()
            call.chunk(deep)

        node.start("w1", streams_deep)
        assert node.chat(stream=True).content.startswith(deep)

    @pytest.mark.parametrize(
        "cut", [b"", b'data: {"choi', b'data: {"choices":[]}\n'], ids=["whole", "line", "event"]
    )
    def test_stream_whose_worker_dies_ends_with_an_error_event(
        self, node: Node, cut: bytes
    ) -> None:
        def dies(call: Call) -> None:
            call.begin_stream()
            call.chunk(*EVENTS[:2])
            if cut:
                call.chunk(cut)

        other = node.start("w2", streams)
        node.start("w1", dies)
        answer = node.chat(stream=True)
        events = [event for event in answer.content.split(b"\n") if event]
        complete = [event.strip() for event in EVENTS[:2]] + (
            [cut.strip()] if cut.endswith(b"\n") else []
        )
        assert events[:-1] == complete
        error = json.loads(events[-1].removeprefix(b"data: "))["error"]
        assert "lost" in error["message"]
        assert error["code"] == 502
        assert other.received == []  # what the client has seen is not computed again

    def test_openai_client_sees_a_lost_stream_as_an_error(self, node: Node) -> None:
        import openai

        def dies(call: Call) -> None:
            call.begin_stream()
            call.chunk(*EVENTS[:2], b'data: {"cho')

        node.start("w1", dies)
        client = openai.OpenAI(base_url=f"{node.api.base_url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model=MODEL, messages=[], stream=True)
        texts: list[str | None] = []
        with pytest.raises(openai.APIError, match="was lost"):
            texts.extend(event.choices[0].delta.content for event in stream)
        assert texts == ["one ", "é "]

    def test_answer_cut_short_is_not_taken_for_a_whole_one(self, node: Node) -> None:
        def dies(call: Call) -> None:
            call.head("200 OK", f"Content-Length: {len(ANSWER)}", "Content-Type: application/json")
            call.send(ANSWER[:10])

        node.start("w1", dies)
        with pytest.raises(httpx.RemoteProtocolError):
            node.chat()


def begins_and_dies(call: Call) -> None:
    call.begin_stream()


class TestRequestsThatEndEngines:
    @pytest.mark.parametrize("dies", [hangs_up, loses_its_engine, begins_and_dies])
    def test_go_to_one_other_worker_and_are_refused_by_every_api_from_then_on(
        self, node: Node, dies: Behaviour
    ) -> None:
        workers = [node.start(f"w{n}", dies) for n in range(3)]
        assert node.chat(stream=True).status_code == 503
        for n in range(2):
            # another API process knows no more than Redis
            node.services.gateway.workers = ChatWorkers(
                node.services.workers, registry.CHAT_MEMORY_S
            )
            answer = node.chat(stream=bool(n), user=f"{n}")
            assert answer.status_code == 400
            assert "refused for ten minutes" in answer.json()["error"]["message"]
        assert sorted(len(worker.received) for worker in workers) == [0, 1, 1]
        told = [one for one in node.services.events.read() if one.kind == "refused"]
        (event,) = [one for one in told if "engines of 2 workers" in one.text]
        assert CHAT in event.text
        assert "proofline_chat_deadly_requests_total 1.0" in node.api.get("/metrics").text
        workers[0].behaviour = workers[1].behaviour = workers[2].behaviour = answers
        assert node.chat(max_tokens=5).content == ANSWER

    def test_are_known_again_where_the_only_worker_was_replaced(self, node: Node) -> None:
        for n in range(2):
            node.start(f"w{n}", hangs_up)
            assert node.chat().status_code == 503
            node.services.workers.remove(f"w{n}")
        worker = node.start("w2", answers)
        assert node.chat().status_code == 400
        assert worker.received == []

    def test_are_known_by_streams_that_broke_off_too(self, node: Node) -> None:
        node.services.gateway.workers = ChatWorkers(node.services.workers, cache_s=0)

        def dies_in_the_stream(call: Call) -> None:
            call.begin_stream()
            call.chunk(EVENTS[0])

        for n in range(2):
            node.start(f"w{n}", dies_in_the_stream)
            assert b"was lost" in node.chat(stream=True).content
            node.services.workers.remove(f"w{n}")
        node.start("w2", streams)
        assert node.chat(stream=True).status_code == 400

    def test_are_not_those_that_were_never_in_an_engine(self, node: Node) -> None:
        def was_lost_before(call: Call) -> None:
            call.answer(b"{}", "503 Service Unavailable", f"{ENGINE_LOST_HEADER}: 0")

        for n in range(3):
            node.start(f"a{n}", answers).die()
            node.start(f"b{n}", was_lost_before)
        node.start("w", answers)
        assert node.chat().content == ANSWER
        assert not node.services.redis.keys("poc:chat:*")

    def test_that_another_engine_answered_are_forgotten(self, node: Node) -> None:
        first = node.start("w1", hangs_up, chat_active=0)
        node.start("w2", answers, chat_active=1)
        assert node.chat().content == ANSWER
        wait_until(lambda: not node.services.redis.keys("poc:chat:*"))
        assert len(first.received) == 1

    def test_are_not_those_that_were_there_for_long(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What two hosts that restart, or two drains, cut off; nor do they wait for a trial."""
        monkeypatch.setattr("api.chat.gateway.RECENT_S", 0.0)
        monkeypatch.setattr("api.chat.suspects.Engine.trial", lambda *_: pytest.fail("a trial"))
        node.services.gateway.workers = ChatWorkers(node.services.workers, cache_s=0)

        def cut_off(call: Call) -> None:
            call.begin_stream()
            call.chunk(EVENTS[0])

        for n in range(3):
            node.start(f"a{n}", cut_off)
            assert b"was lost" in node.chat(stream=True).content
            node.services.workers.remove(f"a{n}")
        workers = [
            node.start(f"b{n}", dies, chat_active=n)
            for n, dies in enumerate((hangs_up, loses_its_engine))
        ]
        third = node.start("b2", answers, chat_active=9)
        assert node.chat().status_code == 503  # one other engine, and no more
        assert [len(one.received) for one in (*workers, third)] == [1, 1, 0]
        assert not node.services.redis.keys("poc:chat:*")
        for n in range(2):
            node.services.workers.remove(f"b{n}")
        assert node.chat().content == ANSWER

    def test_leave_others_that_were_there_to_a_further_worker(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("api.chat.suspects.TRIAL_S", 1.0)  # more than an answer takes
        honest, poison = body(max_tokens=1), body(max_tokens=2)

        def engine(n_honest: int) -> Behaviour:
            """Ends by the poison, when it has so many others."""
            seen: list[bytes] = []
            ended = threading.Event()

            def dies(call: Call) -> None:
                seen.append(call.received.body)
                if any(b'"max_tokens":2' in one for one in seen) and len(seen) > n_honest:
                    ended.set()
                assert ended.wait(60)
                loses_its_engine(call)

            return dies

        first = node.start("w1", engine(2), chat_active=0)
        second = node.start("w2", engine(0), chat_active=10)
        node.start("w3", answers, chat_active=20)
        found: dict[str, int] = {}

        def ask(name: str, sent: dict[str, Any]) -> None:
            found[name] = node.api.post(CHAT, json=sent).status_code

        threads = [
            threading.Thread(target=ask, args=one)
            for one in (("a", honest), ("b", body(max_tokens=3)), ("poison", poison))
        ]
        monkeypatch.setattr(
            node.services.gateway,
            "by_prefix",
            lambda workers, _: sorted(workers, key=lambda one: one.id),
        )
        for n, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda: len(first.received) == n)  # noqa: B023
        for thread in threads:
            thread.join(60)
        assert found == {"a": 200, "b": 200, "poison": 503}
        assert second.received
        assert [node.api.post(CHAT, json=one).status_code for one in (honest, poison)] == [200, 400]


class TestIdleConnections:
    @pytest.mark.parametrize("n_workers", [1, 2])
    def test_that_the_worker_has_closed_cost_it_no_request(
        self, node: Node, n_workers: int
    ) -> None:
        calls: list[Call] = []

        def answers_and_closes_late(call: Call) -> None:
            """Closes the connection when the next request is already on it."""
            calls.append(call)
            call.answer(ANSWER)
            call.connection.recv(65536)

        worker = node.start("w1", answers_and_closes_late)
        others = [node.start("w2", answers, chat_active=5)] if n_workers == 2 else []
        node.services.gateway.workers = ChatWorkers(node.services.workers, cache_s=60)
        for _ in range(4):
            assert node.chat().content == ANSWER
        assert len(worker.received) == 4
        assert all(other.received == [] for other in others)
        assert not node.services.redis.keys("poc:chat:*")
        calls[-1].connection.shutdown(socket.SHUT_RDWR)  # which the API would keep for a minute


class TestTimes:
    """What /metrics tells of requests."""

    def bucket(self, api: httpx.Client, name: str, le: str) -> float | None:
        families = text_string_to_metric_families(api.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        wanted = {"model": MODEL, "le": le}
        return next(
            (one.value for one in samples if one.name == f"{name}_bucket" and one.labels == wanted),
            None,
        )

    def test_first_tokens_are_of_streams_alone(self, api: httpx.Client, start: Start) -> None:
        def streams(call: Call) -> None:
            call.begin_stream()
            call.chunk(*EVENTS)
            call.end_stream()

        start(
            "w1",
            lambda call: streams(call) if b"stream" in call.received.body else call.answer(ANSWER),
        )
        api.post(CHAT, json=body())
        assert self.bucket(api, "proofline_chat_request_seconds", "+Inf") == 1
        assert self.bucket(api, "proofline_chat_first_token_seconds", "+Inf") is None
        api.post(CHAT, json=body(stream=True))
        assert self.bucket(api, "proofline_chat_request_seconds", "+Inf") == 2
        assert self.bucket(api, "proofline_chat_first_token_seconds", "600.0") == 1


class TestClientsThatGo:
    @pytest.mark.parametrize("when", ["before the head", "before the first event", "in the stream"])
    def test_cancel_what_the_worker_does_for_them(self, node: Node, when: str) -> None:
        hung_up: list[bool] = []

        def works_on(call: Call) -> None:
            if when != "before the head":
                call.begin_stream()
            if when == "in the stream":
                call.chunk(EVENTS[0])
            hung_up.append(call.wait_hung_up())

        worker = node.start("w1", works_on)
        connection = http.client.HTTPConnection(node.api.base_url.host, node.api.base_url.port)
        connection.request("POST", CHAT, json.dumps(body(stream=True)), JSON)
        wait_until(lambda: worker.received)
        if when == "in the stream":
            assert connection.getresponse().read1() == EVENTS[0]
        connection.close()
        wait_until(lambda: hung_up)
        assert hung_up == [True]
        wait_until(lambda: not node.services.gateway._active)

    def test_leave_no_second_worker_at_work(self, node: Node) -> None:
        """A request that is given up is not tried elsewhere."""
        first, second = (
            node.start("w1", lambda call: call.wait_hung_up()),
            node.start("w2", answers),
        )
        connection = http.client.HTTPConnection(node.api.base_url.host, node.api.base_url.port)
        connection.request("POST", CHAT, json.dumps(body()), JSON)
        wait_until(lambda: first.received)
        connection.close()
        wait_until(lambda: not node.services.gateway._active)
        assert second.received == []

    def test_load_is_forgotten_with_the_requests(self, node: Node) -> None:
        node.start("w1", hangs_up)
        node.start("w2", answers)
        for _ in range(5):
            node.chat()
        wait_until(lambda: not node.services.gateway._active)


class TestModels:
    def listing(self, *names: str) -> Behaviour:
        entries = [{"id": name, "object": "model", "max_model_len": 2048} for name in names]
        return lambda call: call.answer(json.dumps({"object": "list", "data": entries}).encode())

    def test_are_those_of_all_workers(self, api: httpx.Client, start: Start) -> None:
        start("w1", self.listing(MODEL))
        second = start("w2", self.listing(MODEL))
        start("w3", self.listing("other"), model="other")
        listed = api.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [entry["id"] for entry in listed["data"]] == [MODEL, "other"]
        assert listed["data"][0]["max_model_len"] == 2048
        assert second.received == []

    def test_of_a_dead_worker_are_another_ones(self, api: httpx.Client, start: Start) -> None:
        start("w1", self.listing(MODEL)).die()
        start("w2", self.listing(MODEL))
        assert [entry["id"] for entry in api.get("/v1/models").json()["data"]] == [MODEL]

    def test_of_a_worker_that_hangs_are_left_out(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("api.chat.gateway._LOOKUP_TIMEOUT_S", 5.0)  # the other one's too
        node.start("w1", lambda call: call.wait_hung_up())
        node.start("w2", self.listing("other"), model="other")
        assert [entry["id"] for entry in node.api.get("/v1/models").json()["data"]] == ["other"]

    def test_of_a_worker_that_never_ends_or_answers_otherwise_are_left_out(
        self, node: Node
    ) -> None:
        def endless(call: Call) -> None:
            call.begin_stream()
            with contextlib.suppress(OSError):
                while True:
                    call.chunk(b" " * 65536)

        node.start("w1", endless)
        node.start("w2", lambda call: call.answer(b'{"data": [7]}'), model="second")
        node.start("w3", lambda call: call.answer(b"no JSON"), model="third")
        node.start("w5", lambda call: call.answer(b"[" * 5000), model="fifth")
        for name, value in (("nan", b"NaN"), ("large", b"1e999"), ("half", rb'"\ud800"')):
            entry = b'{"data": [{"id": "%s", "more": %s}]}' % (name.encode(), value)
            node.start(name, lambda call, entry=entry: call.answer(entry), model=name)
        node.start("w4", self.listing("other"), model="other")
        assert [entry["id"] for entry in node.api.get("/v1/models").json()["data"]] == ["other"]

    def test_a_status_that_http_lacks_is_no_answer(self, node: Node) -> None:
        node.start("w1", lambda call: call.answer(b"{}", "999 What"))
        assert node.api.get("/v1/models").json()["data"] == []

    def test_an_id_that_is_no_text_is_no_error_of_others(self, node: Node) -> None:
        node.start("w1", lambda call: call.answer(b'{"data": [{"id": 7}]}'))
        node.start("w2", self.listing("other"), model="other")
        assert node.api.get("/v1/models/other").status_code == 200
        assert node.api.get("/v1/models/none").status_code == 404

    def test_key_is_passed_on_and_its_refusal_too(self, api: httpx.Client, start: Start) -> None:
        def wants_a_key(call: Call) -> None:
            if call.received.values("authorization") == ["Bearer right"]:
                self.listing(MODEL)(call)
            else:
                call.answer(b'{"error":"Unauthorized"}', "401 Unauthorized")

        start("w1", wants_a_key)
        assert api.get("/v1/models").status_code == 401
        assert (
            api.get("/v1/models", headers={"Authorization": "Bearer right"}).json()["data"][0]["id"]
            == MODEL
        )

    @pytest.mark.parametrize("name", [MODEL, "org/other model"])
    def test_one_is_told_by_its_name(self, api: httpx.Client, start: Start, name: str) -> None:
        import openai

        start("w1", self.listing(MODEL))
        start("w2", self.listing("org/other model"), model="org/other model")
        with openai.OpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
            assert client.models.retrieve(name).id == name
            with pytest.raises(openai.NotFoundError, match=f"`unheard` is not .*{MODEL}"):
                client.models.retrieve("unheard")
        assert api.get(f"/v1/models/{name}").json()["max_model_len"] == 2048

    def test_one_whose_workers_are_away_is_to_be_asked_for_again(self, node: Node) -> None:
        node.start("w1", self.listing(MODEL)).die()
        assert node.api.get(f"/v1/models/{MODEL}").status_code == 503

    def test_without_workers_are_none(self, api: httpx.Client) -> None:
        assert api.get("/v1/models").json() == {"object": "list", "data": []}


def test_by_load_keeps_the_order_among_equals(services: Services) -> None:
    records = [worker_record(f"w{index}") for index in range(3)]
    assert Gateway(services.gateway.workers, services.chats).by_load(records) == records


def test_chats_are_counted_with_their_first_token_and_their_failures(node: Node) -> None:
    node.services.chats.report(node.services.history, 0.0)  # what other tests left
    node.start("w1", streams)
    node.chat(stream=True)
    node.start("w2", lambda call: call.answer(b"{}", "500 Internal Server Error"), "another")
    node.chat("another")
    node.services.chats.report(node.services.history, node.services.now())
    told: Counter[str] = Counter()
    for step in node.services.history.read(480, int(node.services.now() // 480 - 1) * 480, 3):
        told.update(step)
    assert (told[CHATS], told[FAILED]) == (2, 1)
    assert sum(n for name, n in told.items() if name.startswith(FIRST_TOKEN)) == 1


def test_a_body_is_parsed_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its model, its bounds, its prefix and its salt."""
    parsed: list[bytes] = []

    def noted(content: bytes) -> Any:
        parsed.append(content)
        return from_json(content)

    for module in ("fields", "suspects"):
        monkeypatch.setattr(f"api.chat.{module}.from_json", noted)
    for name in ("w1", "w2"):
        node.start(name, answers)
    content = json.dumps(body(messages=[{"role": "user", "content": "Hi"}])).encode()
    assert node.api.post(CHAT, content=content, headers=JSON).status_code == 200
    assert parsed == [content]
