"""Generates requests to vLLM's server: valid ones with extreme values in some fields."""

from __future__ import annotations

import json
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

TEXT = "The sea is"
_MESSAGE = {"role": "user", "content": TEXT}
# Path -> the fields of a small valid request; for a path with several models the fields of each.
GOOD: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [_MESSAGE], "max_tokens": 3},
    "/v1/chat/completions/batch": {"messages": [[_MESSAGE]], "max_tokens": 3},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 3},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 3, "store": False},
    "/v1/messages": {"messages": [_MESSAGE], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [_MESSAGE]},
    "/cohere/v2/chat": {"messages": [_MESSAGE], "max_tokens": 3},
    "/tokenize": {"prompt": TEXT, "messages": [_MESSAGE]},
    "/detokenize": {"tokens": [5, 6]},
}
# Fields that are only together too much for an engine.
_TOGETHER: list[dict[str, Any]] = [
    {"seed": 2**63 - 1, "n": 2, "temperature": 1.0},
    {"min_tokens": 2, "stop_token_ids": list(range(300))},
    {"min_tokens": 2**40},
    {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20, "n": 2, "temperature": 1.0},
    {"echo": True, "logprobs": 20, "prompt_logprobs": 20},
    {"use_beam_search": True, "n": 3, "length_penalty": 1e308},
    {"bad_words": [f"{n} words" for n in range(120)], "allowed_token_ids": [5, 6]},
]
# Fields whose large values only cause much work.
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_EDGES = [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400]
_NUMBERS = [0, 1, -1, 2, *_EDGES, *(-one - 1 for one in _EDGES)]
_FLOATS = [float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, 0.5, 3.4e38, 1e39]
_SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$ref": "#/nowhere"},
    {"type": "object", "propertyNames": {"pattern": "a+"}, "properties": {"a": {}}},
    {"type": "object", "patternProperties": {"a": {}, "b": {}}},
    {"type": "string", "pattern": "(" * 50 + "a" + ")*" * 50},
    {"type": "integer", "minimum": 2**70, "maximum": -(2**70)},
    {"type": "array", "minItems": 2**62},
    {"type": "string", "minLength": 2**40},
    {"enum": []},
    {"const": float("nan")},
    {"type": "nothing"},
    True,
    [],
    "{",
]
_GRAMMARS: list[Any] = [
    *({"json": one} for one in _SCHEMAS),
    *({"regex": one} for one in ("(", "a{1000000}", "\0", "[", "(a*)*b", "", "\\p{Xyz}", "(?=a)")),
    *(
        {"grammar": one}
        for one in ("root ::= root", "root ::=", "::=", "root ::= x", "start: start")
    ),
    *({"choice": one} for one in ([], [""], ["a"] * 2000, ["\0"], ["a" * 100_000])),
    {"json_object": True},
    {"json_object": False},
    {"structural_tag": "{}"},
    {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})},
    {"structural_tag": json.dumps({"structures": [], "triggers": [""]})},
    {"json": {}, "regex": "a"},
]

_TEXTS = ["", "\0", "a", "a" * 100_000, "\ud800"]
_OF_TYPE: dict[Any, list[Any]] = {
    bool: [True, False],
    int: _NUMBERS,
    float: [*_FLOATS, *_NUMBERS],
    str: _TEXTS,
}
_LISTS: dict[Any, list[Any]] = {
    int: [[5], [5] * 2000, list(range(400)), [5, 2**64], *([one] for one in _NUMBERS)],
    str: [["a"], ["a"] * 2000, ["word " * 2000], [str(n) for n in range(300)]],
}


def _deep(n: int, one: Any = None) -> Any:
    for _ in range(n):
        one = [one] if n % 2 else {"a": one}
    return one


def _names(model: type[BaseModel]) -> list[str]:
    return [name for name in model.model_fields if name != "model"]


class Maker:
    """A generator of requests, which are always the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def requests(
        self, models: Sequence[tuple[str, type[BaseModel]]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (path, body) without end: each field of each model in turn, some with others."""
        alone = [(*one, name) for one in models for name in _names(one[1])]
        while True:
            self._random.shuffle(alone)
            for path, model, name in alone:
                names = [name]
                if self._random.random() < 0.3:
                    others = _names(model)
                    names += self._random.sample(others, min(2, len(others)))
                good = GOOD[path.removesuffix("/render")]
                body = {name: one for name, one in good.items() if name in model.model_fields}
                for one in names:
                    body[one] = self._poison(one, model.model_fields[one].annotation)
                if self._random.random() < 0.1:
                    body |= self._random.choice(_TOGETHER)
                if self._random.random() < 0.25 and "stream" in model.model_fields:
                    body.setdefault("stream", True)
                yield path, body

    def _poison(self, name: str, annotation: Any) -> Any:
        choose = self._random.choice
        if name in _LENGTHS:
            return choose([0, -1, 2**64, 10**400, -(2**63) - 1, *_FLOATS[:3], "1", "a" * 1000])
        if name in ("structured_outputs", "guided_json") and self._random.random() < 0.8:
            return choose(_GRAMMARS)
        if name == "response_format" and self._random.random() < 0.8:
            schema = choose(_SCHEMAS)
            named = {"name": "a", "schema": schema, "strict": True}
            return choose([{"type": "json_schema", "json_schema": named}, {"type": "json_object"}])
        if name == "tools" and self._random.random() < 0.6:
            return [{"type": "function", "function": {"name": "a", "parameters": choose(_SCHEMAS)}}]
        if name == "sampling_params" or self._random.random() < 0.8:
            return self._of_type(annotation, 3)
        return self._any()

    def _any(self) -> Any:
        choose = self._random.choice
        kinds = [
            lambda: choose(_NUMBERS),
            lambda: choose(_FLOATS),
            lambda: str(choose([*_NUMBERS[:-9], "NaN", "Infinity", "-Infinity"])),
            lambda: [choose([5, -1, 511, 512, 2**31, 2**64])] * choose([1, 129, 1025, 5000]),
            lambda: list(range(choose([2, 129, 400, 3000]))),
            lambda: {str(n): choose([1.0, *_FLOATS]) for n in range(choose([1, 400, 3000]))},
            lambda: choose(["", "\0", "a", "a" * 100_000, "\ud800", "é" * 999, "{}", "#"]),
            lambda: [choose(["a", "", "word " * 200])] * choose([1, 200, 3000]),
            lambda: _deep(
                choose([3, 4, 60, 61, 300, 301, 900]), choose([None, 2**64, float("nan")])
            ),
            lambda: choose([None, True, False, {}, [], [[]], [None], {"": None}]),
        ]
        return choose(kinds)()

    def _of_type(self, annotation: Any, depth: int) -> Any:
        """Returns a value of a field's own type, which passes the first check."""
        choose = self._random.choice
        origin, parts = get_origin(annotation), get_args(annotation)
        if depth == 0:
            return self._any()
        if origin in (Union, types.UnionType):
            return self._of_type(choose([one for one in parts if one is not type(None)]), depth)
        if hasattr(annotation, "__metadata__"):
            return self._of_type(parts[0], depth)
        if annotation in _OF_TYPE:
            return choose(_OF_TYPE[annotation])
        if origin is list:
            several = _LISTS.get(parts[0])
            if several:
                return choose(several)
            return [self._of_type(parts[0], depth - 1)] * choose([1, 1, 3])
        if origin is dict:
            if choose([True, False]):
                return {"5": self._of_type(parts[1], depth - 1)}
            return {str(n): choose([1, "a", *_FLOATS, *_NUMBERS]) for n in range(3000)}
        if origin is Literal:
            return choose(parts)
        return self._of_fields(annotation, depth)

    def _of_fields(self, annotation: Any, depth: int) -> Any:
        fields = self._fields_of(annotation)
        if not fields:
            return self._any()
        n = min(len(fields), self._random.choice([1, 1, 2, 4]))
        some = self._random.sample(sorted(fields), n)
        return {name: self._of_type(fields[name], depth - 1) for name in some}

    def _fields_of(self, annotation: Any) -> dict[str, Any]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return {name: one.annotation for name, one in annotation.model_fields.items()}
        found = getattr(annotation, "__annotations__", None)
        return {name: Any for name in found if not name.startswith("_")} if found else {}
