"""`generate` and `validate` against a stand-in for the API."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from proofline.client import exchange
from tests.peers.job_api import FakeApi


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setattr(exchange, "FIRST_POLL_S", 0.01)
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


@pytest.fixture
def fake(runner: CliRunner) -> Iterator[FakeApi]:
    fake = FakeApi(runner)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, document = fake.answer(self.command, self.path, body)
            payload = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        yield fake
        server.shutdown()
        thread.join()
