"""A Hugging Face hub on loopback, with one small model, as slow as a test wants it."""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "acme/small"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "README.md": b"# small",
}


class Hub:
    """The hub, as a context manager. `delay_s`: before the weights; `asked`: paths, in order."""

    def __init__(self, delay_s: float = 0.0, files: Mapping[str, bytes] = FILES) -> None:
        self.delay_s = delay_s
        self.files = files
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            name = path.partition(f"/resolve/{COMMIT}/")[2] or path.rpartition("/")[2]
            if path.startswith(f"/api/models/{REPO}"):
                siblings = [{"rfilename": name} for name in hub.files]
                found = {"id": REPO, "sha": COMMIT, "siblings": siblings}
                tree = [
                    {
                        "type": "file",
                        "path": name,
                        "oid": hashlib.sha1(data).hexdigest(),
                        "size": len(data),
                    }
                    for name, data in hub.files.items()
                ]
                self._send(json.dumps(tree if "/tree/" in path else found).encode(), with_body)
            elif path.startswith(f"/{REPO}/resolve/") and name in hub.files:
                if with_body and name.endswith(".safetensors"):
                    time.sleep(hub.delay_s)
                self._send(hub.files[name], with_body)
            else:
                self.send_error(404)

        def _send(self, body: bytes, with_body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # the process that asked was ended
                super().handle()

    return Handler
