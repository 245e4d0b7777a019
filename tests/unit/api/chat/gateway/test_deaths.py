"""Workers that die with a request, and requests that end engines."""

import json
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api.chat.chat_workers import ChatWorkers
from poc_core.records import ENGINE_LOST_HEADER
from poc_core.state import registry
from tests.harness.gateway import (
    ANSWER,
    CHAT,
    DONE,
    EVENTS,
    PUBLISHED,
    Node,
    Start,
    answers,
    body,
    hangs_up,
    loses_its_engine,
    streams,
)
from tests.harness.samples import MODEL
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import Behaviour, Call


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
    @pytest.fixture(autouse=True)
    def ends_come_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However slow this machine is, an engine ends soon after it got the request."""
        monkeypatch.setattr("api.chat.gateway.RECENT_S", 60.0)

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

    def test_are_refused_in_the_words_of_their_path(self, node: Node) -> None:
        for n in range(2):
            worker = node.start(f"w{n}", hangs_up)
            node.services.workers.heartbeat(replace(worker.record, chat_paths=PUBLISHED))
        refused = [node.api.post("/v1/messages", json=body()) for _ in range(2)]
        assert [one.status_code for one in refused] == [503, 400]
        kinds = [one.json()["error"]["type"] for one in refused]
        assert kinds == ["overloaded_error", "invalid_request_error"]

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
        honest, poison = body(max_tokens=1), body(max_tokens=2)
        others_go, poison_goes, ended = (threading.Event() for _ in range(3))

        def first_engine(call: Call) -> None:
            is_poison = b'"max_tokens":2' in call.received.body
            assert (poison_goes if is_poison else others_go).wait(60)
            loses_its_engine(call)

        def second_engine(call: Call) -> None:
            if b'"max_tokens":2' in call.received.body:
                ended.set()
            assert ended.wait(60)
            loses_its_engine(call)

        first = node.start("w1", first_engine, chat_active=0)
        second = node.start("w2", second_engine, chat_active=10)
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
        monkeypatch.setattr("api.chat.suspects.TRIAL_S", 0.01)
        others_go.set()
        wait_until(lambda: len(second.received) == 2)
        monkeypatch.setattr("api.chat.suspects.TRIAL_S", 60.0)  # more than an answer takes
        poison_goes.set()
        for thread in threads:
            thread.join(60)
        assert found == {"a": 200, "b": 200, "poison": 503}
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
