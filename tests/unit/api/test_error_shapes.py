"""Errors on the paths of a model's clients, by whoever refuses, have these clients' form."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis.exceptions import ConnectionError as RedisAway

from api.app import create_app
from api.edge.keys import KeyFile, Role
from api.error_shapes import ErrorShapes
from api.routes.services import Services
from poc_core.serving.openai_errors import error_event
from poc_core.settings import Settings

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY = {"model": "x", "messages": []}

Opened = Callable[..., TestClient]


@pytest.fixture
def opened(client: TestClient) -> Opened:
    def open_with(listens_on: str = "127.0.0.1", **settings: Any) -> TestClient:
        services = client.app.state.services  # type: ignore[attr-defined]
        app = create_app(Settings(**settings), services, listens_on)
        return TestClient(app, client=("192.0.2.1", 1), raise_server_exceptions=False)

    return open_with


def check(answer: Any, status: int, path: str) -> str:
    """The message of an error that is in the path's form."""
    assert answer.status_code == status
    said = answer.json()
    error = said["error"]
    assert "detail" not in said
    if path.startswith(MESSAGES):
        assert (said["type"], set(error)) == ("error", {"type", "message"})
    else:
        assert (set(said), set(error)) == ({"error"}, {"message", "type", "param", "code"})
        assert error["code"] == status
    assert int(answer.headers["content-length"]) == len(answer.content)
    return str(error["message"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v3.0.16/v1/completions", "/score"])
class TestOfAnyPath:
    def test_by_the_perimeter(self, opened: Opened, path: str) -> None:
        client = opened()
        check(client.post(path, json=BODY, headers={"Host": "evil.example"}), 421, path)
        check(client.post(path, json=BODY, headers={"Origin": "https://evil.example"}), 403, path)
        check(client.post(path, content=b"{}", headers={"Content-Type": "a/b"}), 400, path)

    def test_by_the_doorkeeper(self, opened: Opened, path: str, tmp_path: Path) -> None:
        keys = KeyFile(tmp_path / "keys.json")
        client = opened("0.0.0.0", api_keys_file=keys.path, max_requests_per_s=0.1)
        check(client.post(path, json=BODY), 401, path)
        bearer = {"Authorization": f"Bearer {keys.add('looks', [Role.READ])}"}
        check(client.post(path, json=BODY, headers=bearer), 403, path)
        bearer = {"Authorization": f"Bearer {keys.add('chats', [Role.CHAT])}"}
        answers = [client.post(path, json=BODY, headers=bearer) for _ in range(2)]
        check(answers[1], 429, path)
        assert int(answers[1].headers["retry-after"]) > 0

    def test_by_the_limit_of_bodies(self, opened: Opened, path: str) -> None:
        client = opened(max_body_bytes=10_000)
        check(client.post(path, json=BODY | {"x": "x" * 10_000}), 413, path)
        chunks = iter([b"x" * 5_000] * 3)
        headers = {"Content-Type": "application/json"}
        check(client.post(path, content=chunks, headers=headers), 413, path)

    def test_by_the_routes(self, opened: Opened, path: str) -> None:
        client = opened()
        answer = client.post(path, json=BODY)
        check(answer, 503, path)
        assert answer.headers["retry-after"] == "5"
        check(client.put(path, json=BODY), 405, path)

    @pytest.mark.parametrize(("error", "status"), [(RedisAway(), 503), (RuntimeError(), 500)])
    def test_of_what_nobody_foresaw(
        self,
        opened: Opened,
        path: str,
        error: Exception,
        status: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        client = opened()
        services: Services = client.app.state.services  # type: ignore[attr-defined]

        async def fails() -> None:
            raise error

        monkeypatch.setattr(services.gateway.workers, "remembered", fails)
        monkeypatch.setattr(services.gateway.workers, "now", fails)
        check(client.post(path, json=BODY), status, path)


def test_other_paths_keep_theirs(opened: Opened) -> None:
    assert set(opened().get("/api/v1/nowhere").json()) == {"detail"}


def test_the_clients_show_the_sentence(opened: Opened) -> None:
    import openai  # here: a second, in every process of a run

    client = opened()
    headers = {"Origin": "https://evil.example"}
    with pytest.raises(openai.PermissionDeniedError, match="POC_ALLOWED_ORIGINS"):
        openai.OpenAI(
            base_url="http://testserver/v1",
            api_key="none",
            http_client=client,
            max_retries=0,
            default_headers=headers,
        ).models.list()


async def answer_of(path: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    async def app(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        for message in messages:
            await send(message)

    sent: list[dict[str, Any]] = []

    async def receive() -> Any: ...

    async def send(message: Any) -> None:
        sent.append(message)

    await ErrorShapes(app)({"type": "http", "path": path, "method": "POST"}, receive, send)
    return sent


JSON = [(b"content-type", b"application/json")]


def parts(status: int, *bodies: bytes) -> list[dict[str, Any]]:
    return [
        {"type": "http.response.start", "status": status, "headers": JSON},
        *({"type": "http.response.body", "body": body, "more_body": True} for body in bodies),
        {"type": "http.response.body", "body": b""},
    ]


async def test_what_is_right_comes_byte_for_byte() -> None:
    error = b'{"error":  {"message":"no", "code": 400}}'
    sent = await answer_of(CHAT, *parts(400, error[:9], error[9:]))
    assert sent[1]["body"] == error
    answer = b'{"detail": "an answer may say so"}'
    sent = await answer_of(CHAT, *parts(200, answer))
    assert sent[1]["body"] == answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no", "type": "BadRequestError"}}', b"no"),
        (b'{"error": "Unauthorized"}', b"Unauthorized"),
        (b'{"detail": [{"loc": ["body", "n"], "msg": "too many", "type": "x"}]}', b"n: too many"),
        (b'["odd"]', b"odd"),
        (b'{"type": "error", "error": {"type": "BadRequestError", "message": "no"}}', b"no"),
        (b"no JSON", b"no JSON"),
        (b"[" * 5000, b"[" * 5000),
        (b"", b"The server gives no reason (HTTP 400)"),
        (b"[]", b"The server gives no reason (HTTP 400)"),
    ],
)
async def test_what_workers_refuse_is_anthropics_below_messages(
    body: bytes, message: bytes
) -> None:
    sent = await answer_of(MESSAGES, *parts(400, body))
    wanted = b'{"type": "error", "error": {"type": "invalid_request_error", "message": "%s"}}'
    assert sent[1]["body"] == wanted % message


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("odd", [None, True, 7, "x", [], ["x"], {}, {"x": 1}])
async def test_fields_of_any_type_are_answered(path: str, odd: Any) -> None:
    entry = {"loc": odd, "msg": "no"}
    bodies: list[dict[str, Any]] = [
        {"type": "error", "error": {"type": odd, "message": "no", "param": odd, "code": odd}},
        {"type": odd, "error": {"message": "no"}},
        {"detail": [entry]},
        {"error": [entry]},
        {"error": entry},
        {"detail": [entry | {"msg": odd, "message": "no"}]},
        {"detail": odd, "why": "no"},
        {"error": {"message": odd, "why": "no"}},
    ]
    for body in bodies:
        sent = await answer_of(path, *parts(400, json.dumps(body).encode()))
        error = json.loads(sent[1]["body"])["error"]
        assert isinstance(error["message"], str)
        assert error["message"], body
        error_event(json.loads(sent[1]["body"]))


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/api/v1/pow/generate"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_an_answer_that_takes_longer_than_the_servers_end_is_no_mistake_of_the_node(
    path: str, has_begun: bool
) -> None:
    """uvicorn cancels it, and would answer 500 Internal Server Error."""
    sent: list[Any] = []

    async def endless(_scope: Any, _receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def cancelled() -> Any:
        scope = {"type": "http", "path": path, "method": "POST", "headers": []}
        task = asyncio.create_task(ErrorShapes(endless)(scope, receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0]

    raised = asyncio.run(cancelled())
    if has_begun:  # the client must not take a part for the answer
        assert isinstance(raised, asyncio.CancelledError)
        assert [message["type"] for message in sent] == ["http.response.start"]
        return
    head, body = sent
    assert (raised, head["status"], dict(head["headers"])[b"retry-after"]) == (None, 503, b"5")
    said = json.loads(body["body"])
    message = said["detail"] if path.startswith("/api/") else said["error"]["message"]
    assert message == "The node is being stopped; try again in 5 s."
