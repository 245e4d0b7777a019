"""`doctor` on disks, ports and receivers."""

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.examine import machine, receiver
from cli.supervise.redis_server import free_port
from poc_core.settings import Settings

GIB = 1024**3


@pytest.fixture
def answers() -> dict[str, Any]:
    return {"/livez": (404, {})}


@pytest.fixture
def server(answers: dict[str, Any]) -> Iterator[int]:
    """The port of something that listens and answers GET."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, document = answers.get(self.path, (405, {}))
            payload = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield listening.server_port
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize(("free_gib", "level"), [(0.5, "problem"), (5, "warning"), (50, "ok")])
def test_a_full_disk_is_wrong_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_gib: float, level: str
) -> None:
    seen = []

    def usage(path: Path) -> SimpleNamespace:
        seen.append(path)
        return SimpleNamespace(free=free_gib * GIB)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    (found,) = machine.disk("Redis", tmp_path / "not" / "yet", 2, 10)
    assert (found.level, seen) == (level, [tmp_path])
    assert ("Make room" in found.remedy) is (level == "problem")


def test_a_port_that_is_taken_is_named_until_it_is_free(server: int) -> None:
    (found,) = machine.port("127.0.0.1", server)
    assert found.level == "problem"
    assert f"Cannot listen on 127.0.0.1 port {server}" in found.says
    assert f":{server}" in found.remedy
    (free,) = machine.port("127.0.0.1", free_port())
    assert free.level == "ok"


def test_a_port_that_a_node_has_is_no_fault(server: int, answers: dict[str, Any]) -> None:
    answers["/livez"] = (200, {"status": "ok"})
    (found,) = machine.port("127.0.0.1", server)
    assert (found.level, "A node answers" in found.says) == ("ok", True)


class TestReceiver:
    def test_any_answer_will_do(self, server: int) -> None:
        found = receiver.receiver(f"http://user:secret@127.0.0.1:{server}/path", Settings())
        assert found.level == "ok"
        assert "(GET: 405)" in found.says
        assert "secret" not in found.says

    def test_nobody_there(self) -> None:
        found = receiver.receiver(f"http://127.0.0.1:{free_port()}", Settings())
        assert (found.level, "cannot be reached from here" in found.says) == ("problem", True)

    def test_one_that_the_policy_forbids_until_it_allows_it(self, server: int) -> None:
        url = f"http://127.0.0.1:{server}"
        found = receiver.receiver(url, Settings(callback_allow="public"))
        assert (found.level, "POC_CALLBACK_ALLOW" in found.remedy) == ("problem", True)
        found = receiver.receiver(url, Settings(callback_allow="127.0.0.1"))
        assert found.level == "ok"

    def test_a_name_that_leads_to_a_forbidden_address(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 80))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_a, **_k: told)
        found = receiver.receiver("http://aggregator.example", Settings())
        assert (found.level, "not allowed here" in found.says) == ("problem", True)

    def test_a_name_that_nobody_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*_: Any, **__: Any) -> None:
            raise socket.gaierror("Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        found = receiver.receiver("http://aggregator.example", Settings())
        assert (found.level, "Name or service not known" in found.says) == ("problem", True)

    @pytest.mark.parametrize("url", ["ftp://host", "http://host?x=1", "host:9100"])
    def test_a_url_that_no_callback_may_have(self, url: str) -> None:
        assert receiver.receiver(url, Settings()).level == "problem"


def test_memory_that_is_short_is_wrong() -> None:
    gib = 1024**3
    (short,) = machine.memory(gib // 2, 64 * gib)
    assert (short.level, "0.5 of 64.0 GiB" in short.says) == ("problem", True)
    (enough,) = machine.memory(8 * gib, 64 * gib)
    assert enough.level == "ok"
