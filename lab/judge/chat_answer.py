"""Reads a file with a chat request and an executor's answer, and builds the request to a
validator.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, ValidationError

from cli.terminal import UsageError

_WANTED = (
    'it must be {"request": {...}, "answer": {...}}: the body of a chat, and its answer or the list'
    " of its stream's chunks"
)
BEST = 5  # entries of a position that the network requests
# Fields of a client's body that are not sent to validators.
_NOT_FOR_VALIDATORS = ("stream_options", "enforced_str")
_MODE = "processed_logprobs"
MODES = {"raw": "raw_logprobs", "processed": _MODE}


class Entry(BaseModel):
    """A token and its log probability."""

    token: str
    logprob: float


class Position(Entry):
    """A token of an answer, with its logprob and the logprobs of the most likely tokens at its
    position.
    """

    top_logprobs: list[Entry]
    bytes: list[int] | None = None


class Usage(BaseModel):
    """How many prompt and completion tokens an answer reports."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Logprobs(BaseModel):
    content: list[Position] | None = None


class _Choice(BaseModel):
    index: int = 0
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Chunk(BaseModel):
    choices: list[_Choice] = []
    usage: Usage | None = None


class Answer(BaseModel):
    """The parts of a chat answer, by an executor or a validator, that are compared."""

    content: list[Position]
    usage: Usage
    finish_reason: str | None = None

    @property
    def positions(self) -> list[dict[str, Any]]:
        return [one.model_dump() for one in self.content]


class ExecutedChat(BaseModel):
    """A chat request, and the answer of the executor, which is the node that served the request."""

    request: dict[str, Any]
    answer: Answer

    @property
    def mode(self) -> str:
        """The logprobs_mode for executor and validator: the request's, or by default the
        network's.
        """
        asked = str(self.request.get("logprobs_mode") or _MODE)
        return MODES.get(asked, asked)


def read_file(path: Path) -> ExecutedChat:
    """Reads an executed chat from a file, or from stdin if the path is "-".

    Raises UsageError unless the file has a chat request and an answer with logprobs.
    """
    try:
        stdin = typer.get_text_stream("stdin")
        text = stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"Cannot read {path} ({error}); {_WANTED}.") from error
    request = document.get("request") if isinstance(document, dict) else None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise UsageError(f"{path} holds no chat's request; {_WANTED}.")
    try:
        answer = read_answer(document.get("answer"))
    except ValueError as error:
        raise UsageError(f"{path} holds no answer with logprobs ({error}); {_WANTED}.") from error
    return ExecutedChat(request=request, answer=answer)


def read_answer(document: Any) -> Answer:
    """Parses a chat answer, or the list of chunks of a streamed answer. Only the first choice is
    used.

    Raises ValueError if the answer has no logprobs.
    """
    try:
        chunks = [
            _Chunk.model_validate(chunk)
            for chunk in (document if isinstance(document, list) else [document])
        ]
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{place}: {problem['msg']}".removeprefix(": ")) from error
    first = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    told = [choice.logprobs for choice in first if choice.logprobs]
    content = [position for one in told for position in one.content or []]
    if not content:
        raise ValueError("there are none in its choices")
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    ends = [choice.finish_reason for choice in first if choice.finish_reason]
    return Answer(
        content=content,
        usage=usages[-1] if usages else Usage(),
        finish_reason=ends[-1] if ends else None,
    )


def validators_request(chat: ExecutedChat) -> dict[str, Any]:
    """Returns the body of the request with which a validator computes the logprobs of the
    executor's tokens (protocol.md, section 9).
    """
    asked = {name: value for name, value in chat.request.items() if name not in _NOT_FOR_VALIDATORS}
    if asked.get("max_completion_tokens") is not None:
        asked["max_tokens"] = asked["max_completion_tokens"]
    if "n" in asked:
        asked["n"] = 1
    return asked | {
        "stream": False,
        "logprobs": True,
        "top_logprobs": BEST,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "logprobs_mode": chat.mode,
        "enforced_tokens": {"tokens": _tokens(chat.answer.content)},
    }


def _tokens(content: Sequence[Position]) -> list[dict[str, Any]]:
    return [
        {"token": one.token, "top_tokens": [entry.token for entry in one.top_logprobs]}
        for one in content
    ]
