"""A host that an operator allows pictures from sends the engine to no other one."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from poc_core.errors import ProoflineError
from tests.harness.marks import needs_vllm
from workers.engines.options import EngineOptions
from workers.vllm import engine

# In whose process vLLM is loaded.
pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]


class Sends(BaseHTTPRequestHandler):
    """Sends each client from /picture to /secret, and notes what is asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(302 if self.path == "/picture" else 200)
        self.send_header("Location", "/secret")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def host() -> Iterator[tuple[str, list[str]]]:
    """Its url, and what it was asked for."""
    asked: list[str] = []
    handler = type("Handler", (Sends,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.mark.promise("a chat user who sends pictures", "cannot make an engine fetch or read a file")
def test_an_engine_follows_no_redirect_of_a_picture(
    host: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.multimodal.media import MediaConnector

    async def start(*_args: object) -> None:
        raise ProoflineError("This is enough.")

    monkeypatch.setattr(engine.launch, "start", start)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # engines write to it
    monkeypatch.delenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", raising=False)
    with pytest.raises(ProoflineError, match="This is enough"):
        engine.VllmEngine(EngineOptions(model="m"))
    url, asked = host
    connector = MediaConnector(allowed_media_domains=["127.0.0.1"])
    with pytest.raises(Exception, match=r"302|Found|cannot|redirect|identify"):
        connector.fetch_image(f"{url}/picture")
    assert asked == ["/picture"]
