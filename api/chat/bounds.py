"""How much one chat request may have computed, so that none keeps an engine from all others."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from poc_core.records import ModelInfo

# An engine computes max_num_seqs answers at a time: a request may have this part of them.
_PART_OF_ENGINE = 2
# Answers that any request may have.
_ALWAYS = 16
# As many answers may be as long as the model's context; more have so many tokens together.
_WHOLE_CONTEXTS = 16
# Of what is compiled before an answer begins: values of a schema, choices or tools, how deep they
# lie in each other, and characters of a text. A worker tries what is within, with a limit of time.
_MOST_VALUES = 10_000
_DEEPEST = 64
_LONGEST_TEXT = 128 * 1024
# What vLLM computes for a completion that names no max_tokens.
_COMPLETION_TOKENS = 16

_NUMBER = TypeAdapter(int)


@dataclass(frozen=True)
class Excess:
    """What a request asks too much of: a sentence, and the field that says it."""

    message: str
    field: str


class _Asked(BaseModel):
    n: JsonValue = None
    best_of: JsonValue = None
    max_tokens: JsonValue = None
    max_completion_tokens: JsonValue = None
    prompt: JsonValue = None
    messages: JsonValue = None
    structured_outputs: JsonValue = None
    response_format: JsonValue = None
    tools: JsonValue = None
    text: JsonValue = None
    output_config: JsonValue = None


def excess(body: bytes, infos: Iterable[ModelInfo]) -> Excess | None:
    """What is too much for the smallest of these engines; None: nothing, or the body is no JSON.

    Fields that are wrong in themselves are vLLM's to refuse.
    """
    engines = list(infos)
    try:
        asked = _Asked.model_validate_json(body)
    except ValidationError:
        return None
    for name, said in _grammars(asked).items():
        if why := _too_complex(said):
            return Excess(f"What {name} asks for {why}.", name)
    if not engines:
        return None
    n, best_of = _number(asked.n), _number(asked.best_of)
    field = "prompt" if asked.prompt is not None else "messages"
    prompts = _prompts(asked)
    answers = prompts * max(n, best_of, 1)
    most = max(_ALWAYS, min(info.max_sequences for info in engines) // _PART_OF_ENGINE)
    if answers > most:
        if prompts <= most:
            field = "best_of" if best_of > n else "n"
        return Excess(f"One request may have {most} answers, this asks for {answers}.", field)
    context = min(info.max_seq_len for info in engines)
    tokens = answers * min(_tokens(asked, context), context)
    if tokens > _WHOLE_CONTEXTS * context:
        return Excess(
            f"The {answers} answers of this request may have {_WHOLE_CONTEXTS * context} tokens"
            f" together, {_WHOLE_CONTEXTS * context // answers} each; this asks for {tokens}.",
            "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens",
        )
    return None


def _prompts(asked: _Asked) -> int:
    """Prompts of a completion, where numbers are tokens of one, or conversations of a batch."""
    given: Any = asked.prompt if asked.prompt is not None else asked.messages
    if not isinstance(given, list) or not given:
        return 1
    return len(given) if isinstance(given[0], str | list) else 1


def _tokens(asked: _Asked, context: int) -> int:
    """The most tokens of each answer."""
    named = max(_number(asked.max_tokens), _number(asked.max_completion_tokens))
    if named > 0:
        return named
    is_short = asked.prompt is not None and "max_tokens" not in asked.model_fields_set
    return _COMPLETION_TOKENS if is_short else context


def _number(value: JsonValue) -> int:
    """As vLLM reads it; 0: it is none."""
    try:
        return _NUMBER.validate_python(value)
    except ValidationError:
        return 0


def _grammars(asked: _Asked) -> dict[str, JsonValue]:
    """What becomes a grammar, by vLLM's names and OpenAI's."""
    return {
        "structured_outputs": asked.structured_outputs,
        "response_format": asked.response_format,
        "tools": asked.tools,
        "text": asked.text,
        "output_config": asked.output_config,
    }


def _too_complex(said: JsonValue) -> str | None:
    """What a grammar, with all that is around it, has too much of."""
    n_values, level = 0, [said]
    for _ in range(_DEEPEST):
        values = [value for value in level if isinstance(value, dict | list)]
        n_values += len(level)
        if n_values > _MOST_VALUES:
            return f"has more than {_MOST_VALUES} values"
        for value in level:
            if isinstance(value, str) and len(value) > _LONGEST_TEXT:
                return f"has a text longer than {_LONGEST_TEXT} characters"
        level = [
            one
            for value in values
            for one in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return None
    return f"lies more than {_DEEPEST} levels deep"
