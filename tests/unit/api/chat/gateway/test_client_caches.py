"""Each client's chats have a prefix cache of their own, by a salt."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from poc_core.records import GATEWAY_SALT_HEADER
from tests.harness.gateway import CHAT, JSON, Node, Start, answers, body


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
