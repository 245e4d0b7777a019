"""Paths with a version before them are the same paths."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from fastapi.testclient import TestClient

from api.edge.version_segment import VersionSegment, without_version


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("/v3.0.16/api/v1/state", "/api/v1/state"),
        ("/v3.0.16/v1/chat/completions", "/v1/chat/completions"),
        ("/v3.0.16/health", "/health"),
        ("/v3.0.16/livez", "/livez"),
        ("/v3.0.16/ready", "/ready"),
        ("/main/metrics", "/metrics"),
        ("/v3.0.16/tokenize", "/tokenize"),
        ("/a%20b/v1/models", "/v1/models"),
        ("/v1/api/v1/state", "/api/v1/state"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/health", "/health"),
        ("/v2/api/v1/state", "/api/v1/state"),
        ("/v3.0.16/rerank", "/rerank"),
        ("/v3.0.16/v2/rerank", "/v2/rerank"),
        ("/v3.0.16/cohere/v2/chat", "/cohere/v2/chat"),
        ("/v3/api/v1/pow/generate/a%252Fb%2Fc", "/api/v1/pow/generate/a%252Fb%2Fc"),
    ],
)
def test_a_version_is_dropped(path: str, rest: str) -> None:
    assert without_version(path.encode()) == rest.encode()


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/health",
            "/api/v1/state",
            "/v1/models",
            "/v1/score",
            "/v1/rerank",
            "/docs/oauth2-redirect",
        ),
        *("/v2/rerank", "/cohere/v2/chat"),
        *(
            "/v3/v2.1/api/v1/state",
            "/other/path",
            "//api/v1/state",
            "/v3.0.16",
            "/a%2Fb",
            "/api/v1/v1/x",
        ),
    ],
)
def test_other_paths_stay_as_they_are(path: str) -> None:
    assert without_version(path.encode()) is None


def test_the_app_sees_both_forms_of_the_rest() -> None:
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope)

    raw = b"/v3/v1/models/a%252Fb"
    sent: dict[str, Any] = {
        "type": "http",
        "path": "/v3/v1/models/a%2Fb",
        "raw_path": raw,
        "query_string": b"x=1",
    }
    asgi: Any = VersionSegment(app)
    anyio.run(asgi, sent, None, None)
    (scope,) = seen
    assert (scope["path"], scope["raw_path"]) == ("/v1/models/a%2Fb", b"/v1/models/a%252Fb")
    assert scope["query_string"] == b"x=1"
    assert sent["raw_path"] == raw  # of the server's own scope nothing is changed


@pytest.mark.parametrize(
    "path", ["/health", "/api/v1/state", "/api/v1/pow/status", "/metrics", "/livez"]
)
def test_every_route_answers_under_a_version(
    client: TestClient, serve: Callable[..., Any], path: str
) -> None:
    serve("w1")
    assert client.get(f"/v3.0.16{path}").status_code == client.get(path).status_code == 200
