"""Which models `/v1/models` lists."""

import contextlib
import json

import httpx
import pytest

from tests.harness.gateway import Node, Start
from tests.harness.samples import MODEL
from tests.peers.fake_worker import Behaviour, Call


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

    def test_are_the_same_with_a_slash_at_the_end(self, api: httpx.Client, start: Start) -> None:
        start("w1", self.listing(MODEL))
        assert api.get("/v1/models/").json() == api.get("/v1/models").json()

    def test_of_a_dead_worker_are_another_ones(self, api: httpx.Client, start: Start) -> None:
        start("w1", self.listing(MODEL)).die()
        start("w2", self.listing(MODEL))
        assert [entry["id"] for entry in api.get("/v1/models").json()["data"]] == [MODEL]

    def test_of_a_worker_that_closes_an_idle_connection_are_asked_for_again(
        self, api: httpx.Client, start: Start
    ) -> None:
        def closes_at_the_second_request(call: Call) -> None:
            self.listing(MODEL)(call)
            if len(worker.received) == 1:
                call.connection.recv(1)

        worker = start("w1", closes_at_the_second_request)
        first, second = (api.get("/v1/models").json() for _ in range(2))
        assert [entry["id"] for entry in second["data"]] == [MODEL]
        assert second == first

    def test_of_a_worker_that_hangs_are_left_out(self, node: Node) -> None:
        node.start("w1", lambda call: call.wait_hung_up())
        node.start("w2", self.listing("other"), model="other")
        assert [entry["id"] for entry in node.api.get("/v1/models").json()["data"]] == ["other"]

    def test_of_a_worker_that_hangs_are_soon_another_ones(
        self, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("api.routes.openai._LOOKUPS_S", (0.5, 600.0))
        for name in ("w1", "w2"):
            node.start(name, lambda call: call.wait_hung_up(600.0))
        node.start("w3", self.listing(MODEL))
        assert [entry["id"] for entry in node.api.get("/v1/models").json()["data"]] == [MODEL]

    def test_of_a_worker_that_is_slow_are_waited_for(self, node: Node) -> None:
        def slow(call: Call) -> None:
            if len(worker.received) > 1 or call.wait_hung_up():
                self.listing(MODEL)(call)

        worker = node.start("w1", slow)
        assert [entry["id"] for entry in node.api.get("/v1/models").json()["data"]] == [MODEL]

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
