"""Where the clients connect to: URLs, the key, and no proxy to this machine."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from proofline.client import AsyncClient, Client, UrlError, exchange
from tests.harness.samples import MODEL, status_answer


@pytest.mark.parametrize(
    "url",
    ["", "ftp://127.0.0.1", "http://", "http://[::1", "http://xn--a:1", "../..", f"{'x' * 64}:1"],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(UrlError):
            kind(url)


@pytest.mark.parametrize("url", ["http://node/", "http://node/api/v1/pow/", "node"])
def test_a_url_may_have_the_paths_beginning_or_no_scheme(url: str) -> None:
    with Client(url) as client:
        assert client.base == "http://node"


@pytest.mark.parametrize(
    ("given", "set_to", "sent"),
    [(None, None, None), (None, "k" * 16, "k" * 16), ("mine", "k" * 16, "mine"), ("", "k", None)],
)
def test_the_key_is_the_given_one_or_the_environments(
    monkeypatch: pytest.MonkeyPatch, given: str | None, set_to: str | None, sent: str | None
) -> None:
    if set_to:
        monkeypatch.setenv("POC_API_KEY", set_to)
    assert exchange.headers(given).get("Authorization") == (f"Bearer {sent}" if sent else None)


class Node(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = json.dumps(status_answer([MODEL])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.usefixtures("dead_proxy")
def test_a_node_on_this_machine_is_called_without_the_environments_proxy(
    host: str,
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Node) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://{host}:{server.server_address[1]}"

        async def asked() -> Any:
            async with AsyncClient(url, patience_s=0) as client:
                return await client.status()

        with Client(url, patience_s=0) as client:
            assert client.status() == asyncio.run(asked())
        server.shutdown()
