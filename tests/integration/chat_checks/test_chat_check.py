"""`proofline chat-check` with real engines: as executor, and as validator over HTTP and in the
command's own process."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import run_here
from tests.harness.marks import needs_vllm
from tests.integration.chat_checks.known import Server, content

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
    pytest.mark.parametrize("server", [64], indirect=True, scope="session"),
]

ASKED: dict[str, Any] = {
    "model": "tiny-qwen3",
    "messages": [{"role": "user", "content": "Tell me about the sea."}],
    "max_tokens": 100,
    "ignore_eos": True,
    "seed": 7,
    "temperature": 0.8,
    "logprobs": True,
    "top_logprobs": 5,
    "logprobs_mode": "processed_logprobs",
}


def written(folder: Path, answer: Any) -> str:
    file = folder / "answer.json"
    file.write_text(json.dumps({"request": ASKED, "answer": answer}))
    return str(file)


def url_of(server: Server) -> str:
    return str(server.http.base_url)


def test_a_node_confirms_an_answer_of_its_own(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, server.ask(ASKED))
    assert run_here("chat-check", file, "--against", url_of(server)) == 0
    assert "Similarity 1.000000" in capfd.readouterr().out


def test_a_node_confirms_a_stream(server: Server, tmp_path: Path) -> None:
    file = written(tmp_path, server.stream(ASKED))
    assert run_here("chat-check", file, "--against", url_of(server)) == 0


def test_another_temperature_than_asked_is_found(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, server.ask({**ASKED, "temperature": 1.6}))
    assert run_here("chat-check", file, "--against", url_of(server), "--threshold", "0.951") == 3
    assert "INVALID: similarity at or below the threshold." in capfd.readouterr().out


def test_a_token_outside_the_vocabulary_is_the_executors_fault(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = deepcopy(server.ask(ASKED))
    foreign = {"token": "999999", "bytes": list(b"999999")}
    content(answer)[3].update(foreign)
    content(answer)[3]["top_logprobs"][0].update(foreign)
    assert run_here("chat-check", written(tmp_path, answer), "--against", url_of(server)) == 3
    assert "The validator answered: " in capfd.readouterr().out


@pytest.mark.slow
def test_an_engine_in_the_commands_own_process_confirms_it(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, server.ask(ASKED))
    engine = ("--model", "tiny-qwen3", "--dtype", "float32", "--", "--enforce-eager")
    assert run_here("chat-check", file, *engine) == 0
    assert "Similarity 1.000000" in capfd.readouterr().out
