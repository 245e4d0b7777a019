"""A stranger's web page can send nothing that changes the node; the network's client can."""

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from api.edge.perimeter import Perimeter
from poc_core.settings import Settings
from tests.harness.samples import body

STOP = "/api/v1/pow/stop"
GENERATE = "/api/v1/pow/generate"
PAGE = "https://evil.example"


def perimeter(allowed_hosts: str = "", own_names: tuple[str, ...] = ()) -> Perimeter:
    async def app(*_: object) -> None: ...

    return Perimeter(app, Settings(allowed_hosts=allowed_hosts), own_names)


class TestHost:
    @pytest.mark.parametrize(
        "host",
        [
            *("127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000", "10.0.0.7:80"),
            *("api:8000", "gpu_7", "a.localhost", "host.docker.internal:8000", "node.local"),
            "localhost.",
        ],
    )
    def test_names_that_no_stranger_can_own_are_known(self, host: str) -> None:
        assert perimeter().knows(host)

    @pytest.mark.parametrize(
        "host",
        [
            *("evil.example", "evil.example:8000", "localhost.evil.example"),
            *("a/collective_rpc#", "a b", "", "x@api"),
        ],
    )
    def test_others_are_not(self, host: str) -> None:
        assert not perimeter().knows(host)

    def test_an_operator_names_the_nodes_own(self) -> None:
        assert perimeter("node.example.org, .gpu.example.org").knows("NODE.example.org:8080")
        assert perimeter(".gpu.example.org").knows("n7.gpu.example.org")
        assert not perimeter(".gpu.example.org").knows("gpu.example.com")
        assert perimeter("*").knows("evil.example")
        assert perimeter(own_names=("node.example.org",)).knows("node.example.org")

    @pytest.mark.promise(
        "a web page",
        "cannot use the API under another host name, from another origin, or through a form",
    )
    def test_a_rebound_name_is_refused_and_told_the_setting(self, client: TestClient) -> None:
        answer = client.post(STOP, headers={"Host": "evil.example:8000"})
        assert answer.status_code == 421
        assert "POC_ALLOWED_HOSTS" in answer.json()["detail"]

    def test_the_name_that_the_refusal_says_to_list_is_one_that_the_setting_takes(
        self, client: TestClient
    ) -> None:
        answer = client.get("/api/v1/pow/status", headers={"Host": "node.example:8443"})
        said = answer.json()["detail"].split("'")[1]
        assert perimeter(said).knows("node.example:8443")

    def test_so_is_looking(self, client: TestClient) -> None:
        assert client.get("/api/v1/pow/status", headers={"Host": "evil.example"}).status_code == 421


class TestOrigin:
    @pytest.mark.promise(
        "a web page",
        "cannot use the API under another host name, from another origin, or through a form",
    )
    @pytest.mark.parametrize("origin", [PAGE, "null", "http://testserver:3000", "http://localhost"])
    def test_a_strangers_page_cannot_stop_the_round(self, client: TestClient, origin: str) -> None:
        answer = client.post(STOP, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "POC_ALLOWED_ORIGINS" in answer.json()["detail"]

    def test_the_nodes_own_page_can(self, client: TestClient) -> None:
        assert client.post(STOP, headers={"Origin": "http://testserver"}).status_code == 200

    def test_a_rebound_page_cannot_although_it_is_its_hosts_own(self, client: TestClient) -> None:
        headers = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert client.post(STOP, headers=headers).status_code == 421

    def test_the_networks_client_sends_none(self, client: TestClient) -> None:
        assert client.post(STOP).status_code == 200


class TestAllowedOrigin:
    @pytest.fixture
    def allowing(self, client: TestClient) -> Iterator[TestClient]:
        app = create_app(Settings(allowed_origins=PAGE), services=client.app.state.services)  # type: ignore[attr-defined]
        with TestClient(app) as allowing:
            yield allowing

    def test_may_use_the_api_and_its_browser_learns_it(self, allowing: TestClient) -> None:
        asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        asked = allowing.options(
            GENERATE, headers=asks | {"Access-Control-Request-Headers": "content-type"}
        )
        assert asked.headers["Access-Control-Allow-Origin"] == PAGE
        assert allowing.post(STOP, headers={"Origin": PAGE}).status_code == 200

    def test_another_may_not(self, allowing: TestClient) -> None:
        assert allowing.post(STOP, headers={"Origin": "https://other.example"}).status_code == 403


class TestBody:
    @pytest.mark.promise(
        "a web page",
        "cannot use the API under another host name, from another origin, or through a form",
    )
    @pytest.mark.parametrize(
        "headers",
        [
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
            {"Content-Type": "multipart/form-data"},
            {"Content-Type": ""},
            [("Content-Type", "application/json"), ("Content-Type", "text/plain")],
            {"Origin": "http://testserver"},  # a page says what it sends
        ],
    )
    def test_what_does_not_say_that_it_is_json_is_415(
        self, client: TestClient, headers: Any
    ) -> None:
        answer = client.post(GENERATE, content=b'{"a": 1}', headers=headers)
        assert answer.status_code == 415
        assert "Content-Type: application/json" in answer.json()["detail"]

    @pytest.mark.parametrize(
        "kind", ["application/json", "Application/JSON; charset=utf-8", "application/ld+json"]
    )
    def test_json_by_any_of_its_names_is_read(self, client: TestClient, kind: str) -> None:
        answer = client.post(GENERATE, content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 422

    def test_audio_may_come_in_a_form_but_from_no_page(self, client: TestClient) -> None:
        sound = {"file": ("a.wav", b"RIFF", "audio/wav")}
        # 503: it came through, and nobody serves audio.
        assert client.post("/v1/audio/transcriptions", files=sound).status_code == 503
        own_page = {"Origin": str(client.base_url)}
        by_page = client.post("/v1/audio/transcriptions", headers=own_page, files=sound)
        assert by_page.status_code == 415

    def test_the_network_node_sends_json_without_a_type(self, client: TestClient) -> None:
        routes = client.app.routes  # type: ignore[attr-defined]
        posts = [
            route.path
            for route in routes
            if route.path.startswith("/api/") and "POST" in getattr(route, "methods", ())
        ]
        assert {"/api/v1/inference/up", "/api/v1/models/status", GENERATE} <= set(posts)
        for path in posts:
            for prefix in ("", "/v3.0.8"):
                untyped = client.post(prefix + path, content=b"{}")
                assert untyped.status_code not in (403, 415), path
                # As when it says what it is; FastAPI's check has its own words for it.
                typed = client.post(prefix + path, json={})
                assert (untyped.status_code, untyped.text) == (typed.status_code, typed.text)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/score"])
    @pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", None])
    def test_a_models_clients_get_400_as_from_vllm(
        self, client: TestClient, path: str, kind: str | None
    ) -> None:
        """The network forwards its users' own types."""
        headers = {} if kind is None else {"Content-Type": kind}
        answer = client.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 400
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
        by_page = client.post(path, content=b"{}", headers=headers | {"Origin": PAGE})
        assert by_page.status_code == 403

    def test_a_body_in_chunks_is_one(self, client: TestClient) -> None:
        chunked = client.post(GENERATE, content=iter([b"{}"]), headers={"Content-Type": "a/b"})
        assert chunked.status_code == 415
        assert client.post(GENERATE, content=iter([b"{}"])).status_code == 422

    def test_nothing_is_queued_by_what_was_refused(self, client: TestClient) -> None:
        client.post(GENERATE, json=body(), headers={"Origin": PAGE})
        assert client.get("/api/v1/pow/status").json()["queued_nonces"] == 0
