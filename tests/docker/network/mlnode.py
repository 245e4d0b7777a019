"""A stand-in for MLNode: its state, and a round of which each nonce is posted once."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

stopped = threading.Event()


def compute(wanted: dict[str, Any]) -> None:
    nonce = 0
    while not stopped.wait(0.2):
        artifacts = [{"nonce": n, "vector_b64": "AAAA"} for n in range(nonce, nonce + 10)]
        nonce += 10
        told = {name: wanted[name] for name in ("public_key", "block_hash", "block_height")}
        body = json.dumps({**told, "node_id": wanted["node_id"], "artifacts": artifacts}).encode()
        urlopen(Request(f"{wanted['url']}/generated", body), timeout=10).read()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"state": "STOPPED", "status": "healthy", "by": "MLNode's stand-in"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path.endswith("/init/generate"):
            stopped.clear()
            threading.Thread(target=compute, args=[body], daemon=True).start()
        if self.path.endswith("/stop"):
            stopped.set()
        self._answer({"status": "OK"})

    def _answer(self, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    servers = [ThreadingHTTPServer(("", port), Handler) for port in (8080, 5000)]
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()
