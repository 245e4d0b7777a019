"""The newest releases of clients that people use, before a node with a real engine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.chat_client import vllm_args
from tests.harness.marks import needs_vllm
from tests.stacks.round_client import FAST
from tests.stacks.up import Up
from workers.vllm.start import cpu_threads

pytestmark = [pytest.mark.integration, pytest.mark.slow, needs_vllm]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests/peers/newest_clients.py"
# Of their own: theirs are other releases of what .venv has.
VENV = ROOT / "build/clients"
PACKAGES = ("openai", "anthropic", "litellm", "langchain-openai", "openai-agents")
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
# A model with random weights would fill a grammar's room for spaces without end.
COMPACT = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')


@pytest.fixture(scope="module")
def python() -> str:
    """The Python that has the clients."""
    found = VENV / "bin/python"
    install = (str(found), "-m", "pip", "install", "--quiet", "--upgrade", *PACKAGES)
    try:
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True, timeout=300)
        subprocess.run(install, check=True, timeout=600, capture_output=True, text=True)
    except subprocess.SubprocessError as error:
        why = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        pytest.skip(f"the clients cannot be installed here: {why}")
    return str(found)


@pytest.fixture(scope="module")
def node() -> Iterator[Up]:
    settings = {**FAST, "OMP_NUM_THREADS": "1", cpu_threads.VARIABLE: "nobind"}
    words = ("--model", "tiny-qwen3", "--dtype", "float32", "--port", "0")
    up = Up(*words, "--", *vllm_args(), *TOOLS, *COMPACT, env=settings)
    yield up
    up.end()


@pytest.mark.parametrize("client", ["openai", "anthropic", "litellm", "langchain", "agents"])
def test_chats_streams_and_calls_tools(node: Up, python: str, client: str) -> None:
    asked = (python, str(PROGRAM), node.base_url, "tiny-qwen3", client)
    # litellm asks GitHub for prices unless it is told not to.
    own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, env=own)
    assert done.returncode == 0, done.stderr[-2000:]
