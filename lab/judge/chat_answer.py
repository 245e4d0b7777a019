"""Reads a file with a chat request and an executor's answer, and makes the validator's request."""

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
    """A token and its logprob."""

    token: str
    logprob: float


class Position(Entry):
    """A token of an answer, with the best tokens at its position."""

    top_logprobs: list[Entry]
    bytes: list[int] | None = None


class Usage(BaseModel):
    """The numbers of tokens that an answer reports."""

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
    """The compared parts of an executor's or validator's chat answer."""

    content: list[Position]
    usage: Usage
    finish_reason: str | None = None

    @property
    def positions(self) -> list[dict[str, Any]]:
        return [one.model_dump() for one in self.content]


class ExecutedChat(BaseModel):
    """A chat request and the answer of the executor, the node that served the request."""

    request: dict[str, Any]
    answer: Answer

    @property
    def mode(self) -> str:
        """The logprobs_mode of both answers; the network's if the request names none."""
        asked = str(self.request.get("logprobs_mode") or _MODE)
        return MODES.get(asked, asked)


def read_file(path: Path) -> ExecutedChat:
    """Reads the file, or stdin for -. UsageError if it has no chat request and answer."""
    try:
        stdin = typer.get_text_stream("stdin")
        text = stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError) as error:
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
    """Parses an answer, or a list of a stream's chunks. Only the first choice is used.

    ValueError if there are no logprobs.
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
    """Returns the body of the validator's request, which contains the executor's tokens
    (protocol.md, section 9).
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
