"""What the documents say one can paste, pasted: their shell, Python and TypeScript examples, in
order, on real vLLM.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.supervise.redis_server import free_port
from tests.harness.documents import ROOT, blocks
from tests.harness.marks import needs_vllm
from tests.harness.waiting import wait_until
from tests.peers.receiver import Receiver
from tests.stacks.up import Up

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("up"),
    needs_vllm,
]

INTERRUPTED = Path(__file__).with_name("interrupted.py")
API = (ROOT / "docs" / "api.md").read_text()
EXAMPLE_S = 200
DELIVERY_S = 300


class Terminal:
    """Runs examples against the shared `up`, in a folder of the test's own."""

    def __init__(self, up: Up, folder: Path) -> None:
        self._replaced = {
            "127.0.0.1:8000": up.base_url.removeprefix("http://"),
            "9100": str(free_port()),
            # It is activated already, as far as PATH goes.
            "source .venv/bin/activate": "true",
            ".venv/bin/proofline": "proofline",
            "sleep 7": "sleep 4",  # payloads leave the shared `up` every second
        }
        self._folder = folder
        (folder / ".curlrc").write_text(
            "fail-with-body\nno-progress-meter\n"
        )  # an error of the API is one of the example
        own = {
            "CURL_HOME": str(folder),
            "HOME": str(folder),
            "PROOFLINE_URL": up.base_url,
            "COLUMNS": "120",
        }
        self._env = {
            **os.environ,
            **own,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def command(self, kind: str, text: str) -> list[str]:
        for documented, own in self._replaced.items():
            text = text.replace(documented, own)
        if kind == "python":
            return [sys.executable, "-c", text]
        if kind == "js":
            return ["node", "--input-type=module", "--eval", text]
        # It would watch for as long as the round lasts.
        text = text.replace(
            "proofline round watch ", f"{sys.executable} {INTERRUPTED} proofline round watch "
        )
        return ["bash", "-euo", "pipefail", "-c", text]

    def run(self, kind: str, text: str) -> str:
        done = subprocess.run(
            self.command(kind, text),
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=EXAMPLE_S,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def start(self, kind: str, text: str, log: Path) -> subprocess.Popen[bytes]:
        env = {**self._env, "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            # exec: no shell is left between us and the receiver.
            return subprocess.Popen(
                self.command(kind, f"exec {text}"),
                cwd=self._folder,
                env=env,
                stdout=file,
                stderr=file,
            )


@pytest.fixture(scope="module")
def terminal(up: Up, tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    return Terminal(up, tmp_path_factory.mktemp("terminal"))


@pytest.fixture(autouse=True)
def no_round_is_left(up: Up) -> Iterator[None]:
    """Ends the round of a test that failed."""
    yield
    httpx.post(f"{up.base_url}/api/v1/pow/stop", timeout=300, trust_env=False).raise_for_status()


def examples(document: str, section: str) -> list[tuple[str, str]]:
    """(sh, python or js, text) of what can run below this heading; test_blocks.py holds that
    nothing is left out.
    """
    found = [
        block
        for block in blocks(ROOT / document)
        if block.section == section and block.kind in ("sh", "python", "js")
    ]
    return [(block.kind, block.text) for block in found if not block.comment.startswith("not run")]


def test_the_readme(terminal: Terminal) -> None:
    (asking,) = examples("README.md", "Two commands")
    said = terminal.run(*asking)
    assert re.search(r'"nonce":\s*9\b', said), said
    assert re.search(r'"completion_tokens":\s*[1-9]', said), said


def test_the_first_artifacts(terminal: Terminal) -> None:
    (commands,) = examples("docs/start.md", "First artifacts")
    assert "No fraud: 0 of 100 artifacts mismatch" in terminal.run(*commands)


def test_jobs(terminal: Terminal) -> None:
    wait, check, later, commands = (
        terminal.run(*example) for example in examples("docs/api.md", "Jobs")
    )
    assert [artifact["nonce"] for artifact in json.loads(wait)["artifacts"]] == [1, 2, 999]
    assert json.loads(check)["fraud_detected"] is False
    assert json.loads(later)["status"] in ("queued", "running", "completed")
    assert "No fraud: 0 of 100 artifacts mismatch" in commands


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_job_from_typescript(terminal: Terminal) -> None:
    (job,) = examples("docs/api.md", "From TypeScript")
    lines = terminal.run(*job).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "999"]


@pytest.mark.parametrize(
    "choice", ["auto", {"type": "function", "function": {"name": "switch_light"}}], ids=str
)
def test_a_tool_without_a_parser_is_refused_as_the_page_says(
    terminal: Terminal, choice: str | dict[str, object]
) -> None:
    asked = {
        "model": "tiny-qwen3",
        "messages": [{"role": "user", "content": "It is dark."}],
        "tools": [{"type": "function", "function": {"name": "switch_light"}}],
        "tool_choice": choice,
    }
    said = terminal.run(
        "sh",
        "curl -s --no-fail-with-body http://127.0.0.1:8000/v1/chat/completions"
        f" -H 'Content-Type: application/json' -d '{json.dumps(asked)}'",
    )
    assert "gets 400, and the message names the missing option" in API
    error = json.loads(said)["error"]
    assert (error["code"], "--tool-call-parser" in error["message"]) == (400, True)


def test_a_backup(terminal: Terminal) -> None:
    (backup,) = examples("docs/backup.md", "Backup")
    terminal.run(*backup)
    assert "settings" in json.loads(terminal.run("sh", "cat backup/settings.json"))


def test_chat(terminal: Terminal) -> None:
    whole, streamed = (terminal.run(*example) for example in examples("docs/api.md", "Chat"))
    assert json.loads(whole)["usage"]["completion_tokens"] > 0
    assert streamed


def test_the_client(terminal: Terminal) -> None:
    (job,) = examples("docs/client.md", "A job")
    assert "0 of 32 mismatch, fraud: False" in terminal.run(*job)
    (a_round,) = examples("docs/client.md", "A round")
    assert terminal.run(*a_round).startswith("GENERATING ")
    (asyncio,) = examples("docs/client.md", "Asyncio")
    assert "['tiny-qwen3']\nINFERENCE " in terminal.run(*asyncio)
    (other,) = examples("docs/client.md", "Other requests")
    assert "'port'" in terminal.run(*other)


def test_a_round(terminal: Terminal, tmp_path: Path) -> None:
    receiver, calls, commands = examples("docs/api.md", "A round")
    log = tmp_path / "receiver.log"
    listening = terminal.start(*receiver, log)
    try:
        answers = terminal.run(*calls)
        assert '"status":"OK"' in answers
        assert '"backends":[{"port":' in answers
        wait_until(
            lambda: re.search(r"/generated \w+-0 \d+ artifacts", log.read_text()),
            "artifacts at the receiver",
            DELIVERY_S,
            0.2,
        )
        assert "The round is stopped." in terminal.run(*commands)
    finally:
        listening.terminate()
        listening.wait()


def test_a_distance_round(terminal: Terminal) -> None:
    ((kind, text),) = examples("docs/distance.md", "A round in two phases")
    with Receiver() as receiver:
        answers = terminal.run(kind, text.replace("http://127.0.0.1:9091", receiver.url))
        assert re.search(r'"n_invalid":\s*1\b', answers), answers
        wait_until(
            lambda: any(p.path == "/validated" for p in receiver.payloads),
            "the verdict",
            DELIVERY_S,
            0.2,
        )


def test_keys(terminal: Terminal) -> None:
    (commands,) = examples("SECURITY.md", "Keys")
    said = terminal.run(*commands)
    assert "aggregator" in said
    assert "users" in said
