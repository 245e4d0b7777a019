"""`proofline chat-check` against a stand-in for the node that validates."""

import json
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import run_here

REQUEST = {
    "model": "tiny-qwen3",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 7,
    "max_completion_tokens": 3,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": 7,
    "temperature": 0.9,
    "top_logprobs": 2,
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 3}


def position(token: str, logprob: float) -> dict[str, Any]:
    best = [{"token": token, "logprob": logprob}, {"token": "99", "logprob": -4.0}]
    return {"token": token, "logprob": logprob, "top_logprobs": best, "bytes": []}


CONTENT = [position("11", -0.5), position("12", -0.25), position("2", -1.0)]


def answer(content: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": content}}
    return {"choices": [choice], "usage": USAGE if usage is None else usage}


class Node:
    """Answers every chat alike, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.answer: Any = answer(CONTENT)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                node.asked.append((self.path, body))
                said = node.answer
                text = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(node.status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_told: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def body(self) -> dict[str, Any]:
        ((path, body),) = self.asked
        assert path == "/v1/chat/completions"
        return body


@pytest.fixture
def node() -> Iterator[Node]:
    found = Node()
    threading.Thread(target=found.server.serve_forever, args=(0.01,), daemon=True).start()
    yield found
    found.server.shutdown()
    found.server.server_close()


Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Check:
    """Runs the command on a file of this answer; (exit code, stdout, stderr)."""

    def run(executed: Any, request: Any = REQUEST, *arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "answer.json"
        file.write_text(json.dumps({"request": request, "answer": executed}))
        where = arguments or ("--against", node.url)
        code = run_here("chat-check", str(file), *where)
        return code, *capfd.readouterr()

    return run


def test_an_answer_that_is_confirmed_is_valid(node: Node, check: Check) -> None:
    code, stdout, _ = check(answer(CONTENT))
    assert code == 0
    assert stdout.startswith("VALID: pass.")
    assert "Similarity 1.000000, which must be above 0.9;" in stdout


@pytest.mark.usefixtures("dead_proxy")
def test_a_node_on_this_machine_is_asked_without_the_environments_proxy(
    check: Check,
) -> None:
    assert check(answer(CONTENT))[0] == 0


def test_the_node_is_asked_as_a_validator_asks(node: Node, check: Check) -> None:
    check(answer(CONTENT))
    tokens = [{"token": one, "top_tokens": [one, "99"]} for one in ("11", "12", "2")]
    assert node.body == {
        "model": "tiny-qwen3",
        "messages": REQUEST["messages"],
        "max_tokens": 3,
        "max_completion_tokens": 3,
        "n": 1,
        "seed": 7,
        "temperature": 0.9,
        "stream": False,
        "logprobs": True,
        "top_logprobs": 5,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "logprobs_mode": "processed_logprobs",
        "enforced_tokens": {"tokens": tokens},
    }


def test_a_stream_is_read_as_its_answer(node: Node, check: Check) -> None:
    chunks = [
        {"choices": [{"delta": {"role": "assistant"}, "logprobs": None}]},
        {"choices": [{"logprobs": {"content": CONTENT[:2]}}]},
        {"choices": [{"logprobs": {"content": CONTENT[2:]}}], "usage": None},
        {"choices": [], "usage": USAGE | {"completion_tokens": 9}},
    ]
    code, stdout, _ = check(chunks)
    assert [one["token"] for one in node.body["enforced_tokens"]["tokens"]] == ["11", "12", "2"]
    assert code == 3
    assert "The executor claims 5 and 9 tokens, the validator 5 and 3 tokens." in stdout


def finished(reason: str, n: int, claimed: int) -> dict[str, Any]:
    found = answer(CONTENT[:n], USAGE | {"completion_tokens": claimed})
    found["choices"][0]["finish_reason"] = reason
    return found


@pytest.mark.parametrize(
    ("executed", "validated", "code", "why"),
    [
        (finished("stop", 2, 9), finished("length", 2, 2), 3, "it claims 9 tokens and has"),
        (finished("stop", 2, 3), finished("length", 2, 2), 0, "it claims 3 tokens and has"),
        (finished("stop", 2, 2), finished("length", 2, 2), 0, "a stop ended it, and none does"),
        (finished("length", 2, 2), finished("length", 2, 2), 0, "ran out of tokens after 2 of 3"),
        (finished("stop", 2, 2), finished("stop", 2, 2), 0, ""),
        (finished("length", 3, 3), finished("length", 3, 3), 0, ""),
    ],
)
def test_an_answer_that_was_cut_off_is_said_to_be(
    node: Node,
    check: Check,
    executed: dict[str, Any],
    validated: dict[str, Any],
    code: int,
    why: str,
) -> None:
    """The network's comparison passes what is left of it."""
    node.answer = validated
    found, stdout, _ = check(executed)
    assert found == code
    assert ("The answer looks truncated: " in stdout) == bool(why)
    assert why in stdout


def test_the_positions_furthest_apart_come_first(node: Node, check: Check) -> None:
    executed = deepcopy(CONTENT)
    executed[1] = position("12", -2.5)
    code, stdout, _ = check(answer(executed), {**REQUEST, "model": "GLM-5.3-Flash"})
    assert code == 0  # three tokens tell little
    rows = [line.split() for line in stdout.splitlines() if line.strip()[:1].isdigit()]
    assert rows[0][:6] == ["1", "0.2045", "12:", "-2.5000", "12:", "-0.2500"]
    assert [row[0] for row in rows] == ["1", "0", "2"]
    assert "which must be above 0.951" in stdout


@pytest.mark.parametrize(
    ("threshold", "code", "said"),
    [
        ((), 3, "INVALID: similarity at or below the threshold."),
        (("--threshold", "0.5"), 0, "VALID"),
    ],
    ids=["the network's", "given"],
)
def test_an_answer_that_lies_too_far_is_invalid(
    node: Node, check: Check, threshold: tuple[str, ...], code: int, said: str
) -> None:
    node.answer = answer([position("11", -0.1)] * 100)
    far = answer([position("11", -1.0)] * 100)
    found, stdout, _ = check(far, REQUEST, "--against", node.url, *threshold)
    assert (found, stdout[: len(said)]) == (code, said)


def test_what_the_validator_cuts_is_invalid(node: Node, check: Check) -> None:
    node.answer = answer(CONTENT[:2])
    code, stdout, _ = check(answer(CONTENT))
    assert code == 3
    assert "The validator ends after 2 of 3 tokens" in stdout


def test_a_node_that_decodes_tokens_of_its_own_is_seen(node: Node, check: Check) -> None:
    node.answer = answer([CONTENT[0], position("13", -1.0), CONTENT[2]])
    code, stdout, _ = check(answer(CONTENT))
    assert code == 3
    assert "The first token that differs is at position 1." in stdout


def test_texts_for_tokens_are_invalid_whoever_validates(node: Node, check: Check) -> None:
    code, stdout, _ = check(answer([position("Hello", -0.5)]))
    assert code == 3
    assert "Tokens must be ids in decimal" in stdout
    assert node.asked == []


def test_tokens_that_the_validator_refuses_are_invalid(node: Node, check: Check) -> None:
    error = {"message": "there is no token 999999", "param": "enforced_tokens", "code": 400}
    node.status, node.answer = 400, {"error": error}
    code, stdout, _ = check(answer([position("999999", -0.5)]))
    assert code == 3
    assert "The validator answered: there is no token 999999" in stdout


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (400, {"error": {"message": "too long", "param": None}}, "pass unseen"),
        (503, {"error": {"message": "cannot be scored here"}}, "cannot be scored here"),
        (500, ["what"], "HTTP 500"),
        pytest.param(200, b"[" * 100_000, "answers no chat with logprobs", id="nested deeply"),
        (200, {"choices": []}, "answers no chat with logprobs"),
        (200, answer([position("Hello", -0.5)] * 3), "texts instead of token ids"),
    ],
)
def test_without_an_answer_there_is_no_verdict(
    node: Node, check: Check, status: int, said: Any, told: str
) -> None:
    node.status, node.answer = status, said
    code, stdout, stderr = check(answer(CONTENT))
    assert (code, stdout) == (1, "")
    assert told in stderr


@pytest.mark.parametrize("odd", ["many", 1e400])
def test_an_executors_request_with_an_odd_number_gets_a_verdict(check: Check, odd: Any) -> None:
    assert check(answer([position("Hello", -0.5)]), {**REQUEST, "top_logprobs": odd})[0] == 3


def test_a_node_that_is_not_there_is_named(check: Check) -> None:
    code, _, stderr = check(answer(CONTENT), REQUEST, "--against", "http://127.0.0.1:9")
    assert code == 1
    assert "No answer from http://127.0.0.1:9" in stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "Cannot read"),
        ("[" * 100_000, "Cannot read"),
        ("[]", "holds no chat's request"),
        ('{"request": {}, "answer": {}}', "holds no chat's request"),
        ('{"request": {"messages": []}}', "holds no answer with logprobs"),
        ('{"request": {"messages": []}, "answer": {"choices": [{"logprobs": null}]}}', "are none"),
        ('{"request": {"messages": []}, "answer": ["data: 1"]}', "valid dictionary"),
        (
            '{"request": {"messages": []}, "answer": {"choices": [{"logprobs": {"content":'
            ' [{"token": "9", "logprob": -1}]}}]}}',
            "choices.0.logprobs.content.0.top_logprobs",
        ),
        ('{"request": {"messages": []}, "answer": {"choices": ["what"]}}', "holds no answer"),
    ],
)
def test_a_file_that_is_no_such_thing_is_refused(
    text: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.json"
    file.write_text(text)
    assert run_here("chat-check", str(file)) == 2
    stderr = capfd.readouterr().err
    assert told in stderr
    assert '{"request": {...}, "answer": {...}}' in stderr


def test_a_file_that_is_not_there_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here("chat-check", "/nowhere/answer.json") == 2
    assert "Cannot read /nowhere/answer.json" in capfd.readouterr().err


class StandIn:
    """An engine whose chat is the node's."""

    def __init__(self, port: int | None) -> None:
        self.port = port
        self.closed = False

        class Info:
            name = "tiny-llama"

        self.info = Info()

    def unfinished_chat(self) -> int:
        return 0

    def serve_chat(self, *_told: Any) -> int | None:
        return self.port

    def close(self) -> None:
        self.closed = True


def test_an_engine_of_its_own_validates(
    node: Node, check: Check, stand_in: Callable[[Any], None]
) -> None:
    engine = StandIn(node.port)
    stand_in(engine)
    code, _, _ = check(answer(CONTENT), REQUEST, "--model", "tiny-llama")
    assert code == 0
    assert node.body["model"] == "tiny-llama"
    assert engine.closed


def test_an_engine_without_chat_cannot_validate(
    check: Check, stand_in: Callable[[Any], None]
) -> None:
    stand_in(StandIn(None))
    arguments = ("--model", "tiny-qwen3", "--engine", "transformers")
    code, _, stderr = check(answer(CONTENT), REQUEST, *arguments)
    assert code == 2
    assert "--engine transformers has no chat" in stderr


def test_a_node_and_an_engine_are_one_too_many(check: Check) -> None:
    arguments = ("--model", "tiny-qwen3", "--against", "http://127.0.0.1:9")
    code, _, stderr = check(answer(CONTENT), REQUEST, *arguments)
    assert code == 2
    assert "not both" in stderr
