"""`proofline receive` as a process of its own."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cli.supervise.processes import command_of_proofline

BODY = {
    "payload_id": "r-0",
    "artifacts": [{"nonce": nonce, "vector_b64": "AA=="} for nonce in range(3)],
}


class Receiving:
    """The command, and what it wrote when it has ended."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            command_of_proofline("receive", "--port", "0", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        found = re.search(r"http://\S+:\d+", self.process.stderr.readline())
        assert found
        self.url = found[0]

    def post(self, body: Any, path: str = "/generated") -> int:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, trust_env=False).status_code

    def end(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


@pytest.fixture
def started() -> Iterator[list[Receiving]]:
    commands: list[Receiving] = []
    yield commands
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.communicate()


def test_it_takes_payloads_and_sums_up_at_the_end(started: list[Receiving]) -> None:
    started.append(receiving := Receiving())
    assert receiving.post(BODY, "/poc/a%252Fb/generated") == 200
    assert receiving.post(b"no JSON") == 400
    assert receiving.post([1]) == 400
    code, out, err = receiving.end()
    assert (code, out.splitlines()[0]) == (0, "/poc/a%252Fb/generated r-0 3 artifacts")
    assert "round r: 3 nonces in 1 payloads, none missing" in err


def test_what_is_missing_shows_in_the_exit_code(started: list[Receiving]) -> None:
    started.append(receiving := Receiving("--json"))
    receiving.post(BODY)
    receiving.post({**BODY, "payload_id": "r-1", "artifacts": [{"nonce": 5, "vector_b64": "AA=="}]})
    code, out, err = receiving.end(signal.SIGTERM)
    assert (code, "2 nonces MISSING: 3, 4" in err) == (1, True)
    assert [json.loads(line)["body"]["payload_id"] for line in out.splitlines()] == ["r-0", "r-1"]


def test_it_refuses_when_told_to(started: list[Receiving]) -> None:
    started.append(receiving := Receiving("--answer", "503"))
    assert receiving.post(BODY) == 503
    assert receiving.end()[:2] == (
        0,
        f"/generated {len(json.dumps(BODY))} bytes refused with 503\n",
    )


def test_a_port_in_use_is_one_clear_line(started: list[Receiving]) -> None:
    started.append(receiving := Receiving())
    port = receiving.url.rpartition(":")[2]
    second = subprocess.run(
        command_of_proofline("receive", "--port", port),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (second.returncode, "choose another --port" in second.stderr) == (2, True)
