"""A newcomer at a node: README's commands, and the mistakes that one makes with them.

Each answer is a sentence or two that say what to do, without a traceback, and no exit code is 0.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.supervise.processes import command_of_proofline
from cli.supervise.redis_server import free_port
from tests.harness.documents import ROOT, blocks
from tests.harness.waiting import wait_until
from tests.stacks.up import Up, environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]

KEY = "k" * 32
NO_REDIS = "redis://127.0.0.1:9/0"  # nothing listens there
# Lines of an answer beside the usage, which typer shows of wrong words; boxes are drawn around it.
MOST_LINES = 6
PROOF = "generate --block-hash TEST_BLOCK --public-key node1 --seq-len 8"

# What the newcomer writes; the exit code; what the answer says. URL: of the node, PORT: its port.
MISTAKES = [
    (
        "status --url http://127.0.0.1:9",
        1,
        r"No answer from http://127\.0\.0\.1:9 .* running there",
    ),
    ("status --url ftp://127.0.0.1", 2, r"--url: A node's url must look like http://host:port"),
    ("status --url KEYED", 1, r"This needs a key: send .* `proofline key new`"),
    ("generat --nonces 0-9", 2, r"No such command 'generat'\. Did you mean 'generate'"),
    (f"{PROOF} --nonce 0-9 --url URL", 2, r"No such option: --nonce .*--nonces"),
    (f"{PROOF} --url URL", 2, r"Give --nonces, or --request-id of a job to wait for"),
    (f"{PROOF} --url URL --nonces 9-0", 2, r"9-0"),
    (f"{PROOF} --url URL --nonces abc", 2, r"abc"),
    (
        f"{PROOF} --url URL --nonces 0-9 --model lama",
        1,
        r"lama.*tiny-qwen3|No worker serves .*lama",
    ),
    (f"{PROOF} --url URL --nonces 0-9 --k-dim 99999", 1, r"k_dim.*99999|99999.*k_dim"),
    (f"{PROOF} --url URL --nonces 0-9 --scheme toy", 2, r"no proof scheme 'toy'; use one of"),
    (f"{PROOF} --url URL --nonces 0-9 --scheme decode --param steps=4", 2, r"no parameter steps"),
    (
        f"{PROOF} --url URL --nonces 0-9 -o /nowhere/a.json",
        2,
        r"/nowhere/a\.json cannot be written",
    ),
    (
        "validate nowhere.json --url URL",
        2,
        r"Cannot read nowhere\.json .*`proofline generate` wrote",
    ),
    ("validate broken.json --url URL", 2, r"broken\.json is not JSON .*`proofline generate` wrote"),
    ("validate other.json --url URL", 2, r"other\.json holds no artifacts"),
    ("round watch --url URL", 1, r"No round is running .*`proofline round start`"),
    ("api --port PORT", 2, r"port PORT .*stop what uses it, or choose another --port"),
    ("up --model tiny-qwen3 --engine synthetic --port PORT", 2, r"port PORT .*another --port"),
    ("receive --port PORT", 2, r"port PORT .*another --port"),
    (f"ready --redis-url {NO_REDIS}", 1, r"Redis does not answer .*POC_REDIS_URL"),
]


@pytest.fixture(scope="module")
def node() -> Iterator[Up]:
    """README's second command, with an engine that starts at once."""
    up = Up("--model", "tiny-qwen3", "--engine", "synthetic", "--port", "0")
    yield up
    up.end()


@pytest.fixture(scope="module")
def keyed() -> Iterator[str]:
    """An API that wants a key, and whose Redis is away."""
    port = free_port()
    settings = {"POC_REQUIRE_KEYS": "always", "POC_API_KEY": KEY}
    api = subprocess.Popen(
        command_of_proofline("api", "--port", str(port), "--redis-url", NO_REDIS),
        env=environment(settings),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def lives() -> bool:
        try:
            return httpx.get(f"{url}/livez", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(lives, "the API")
        yield url
    finally:
        api.terminate()
        api.wait(30)


def run(words: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_of_proofline(*shlex.split(words)),
        cwd=folder,
        env=environment({"COLUMNS": "200", "PYTHONPATH": os.fspath(ROOT), **more}),
        capture_output=True,
        text=True,
        timeout=300,
    )


def said(answer: subprocess.CompletedProcess[str]) -> str:
    """What an error says, as one line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in answer.stderr.splitlines()]
    told = [line for line in lines if line and not line.startswith(("Usage:", "Try '", "Error"))]
    assert len(told) <= MOST_LINES, answer.stderr
    return " ".join(told)


def test_the_readmes_commands_answer(node: Up, tmp_path: Path) -> None:
    (block,) = [
        block
        for block in blocks(ROOT / "README.md")
        if block.kind == "sh" and "proofline generate" in block.text
    ]
    words = next(line for line in block.text.splitlines() if "proofline generate" in line)
    words = words.partition("proofline ")[2]
    generated = run(f"{words} -o proof.json", tmp_path, PROOFLINE_URL=node.base_url)
    assert generated.returncode == 0, generated.stderr
    address = node.base_url.removeprefix("http://")
    validated = run(f"validate proof.json --url {address}", tmp_path)
    assert (validated.returncode, "No fraud" in validated.stderr) == (0, True), validated.stderr
    status = run(f"status --url {address}", tmp_path)
    assert status.returncode == 0, status.stderr
    assert "1 of 1 ready" in status.stdout
    assert len(status.stdout.splitlines()) <= 24


@pytest.mark.parametrize(("words", "code", "wanted"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_mistake_is_told_in_a_sentence(
    node: Up, keyed: str, tmp_path: Path, words: str, code: int, wanted: str
) -> None:
    (tmp_path / "broken.json").write_text('{"artifacts": [')
    (tmp_path / "other.json").write_text('{"hello": 1}')
    port = node.base_url.rpartition(":")[2]
    for name, value in (("KEYED", keyed), ("URL", node.base_url), ("PORT", port)):
        words, wanted = re.sub(rf"\b{name}\b", value, words), re.sub(rf"\b{name}\b", port, wanted)
    answer = run(words, tmp_path)
    assert answer.returncode == code, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stdout + answer.stderr
    assert re.search(wanted, said(answer)), answer.stderr


@pytest.mark.parametrize(
    ("key", "wanted"), [("wrong", "The key is wrong"), (KEY, "cannot reach its Redis")]
)
def test_a_wrong_key_and_an_unreachable_redis_are_told_apart(
    keyed: str, tmp_path: Path, key: str, wanted: str
) -> None:
    answer = run(f"round stop --url {keyed}", tmp_path, POC_API_KEY=key)
    assert answer.returncode == 1
    assert wanted in said(answer)


def test_a_setting_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    answer = run("config", tmp_path, POC_MAX_WAITING_REQUESTS="many")
    assert answer.returncode == 2
    assert "POC_MAX_WAITING_REQUESTS" in said(answer)
