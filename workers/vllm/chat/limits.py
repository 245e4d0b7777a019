"""Limits of request fields. A number or list beyond these limits could end the engine."""

import math
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any

from poc_core.chat_bounds import TOKEN_CHARS
from workers.vllm.chat.errors import BadRequest, refuse_foreign

# Range of msgpack's integers; vLLM's server uses msgpack to talk to its core.
_LEAST, _MOST = -(2**63), 2**64 - 1
# Largest exponent of an answer's length in a beam's score, so that no score is 0 or infinite.
_LENGTH_PENALTY = 10
# Values checked between two yields of the event loop: about a millisecond.
_AT_ONCE = 4096
# Fields of vLLM's request to its core that are checked separately or created by vLLM.
_ELSEWHERE = {"sampling_params", "prompt_token_ids", "prompt_is_token_ids", "mm_features"}


@dataclass(frozen=True)
class Limits:
    """Limits of request fields. The defaults are the row sizes of vLLM's V2 model runner. The V1
    runner has no such limits, but all nodes of a network should refuse the same requests.
    """

    allowed_token_ids: int = 1024  # repeated ids count
    logit_bias: int = 1024
    stop_token_ids: int = 128  # only with min_tokens, until which these ids are masked
    bad_words: int = 128
    bad_words_tokens: int = 1024
    tokens: int = 2**30  # of an answer, unless vLLM has already cut it to the context
    stop: int = 128  # our limit: vLLM searches for each string after each token
    # Our limit of max_pattern_size squared times min_count: after each token, vLLM compares up to a
    # quarter as many tokens in Python. 38 s a token were seen for 8,000 squared times 2.
    repetition_detection: int = 2**16
    thinking_token_budget: int = 2**31 - 1
    n_ids: int = 2**31  # size of the model's vocabulary

    def check(self, fields: Any) -> Iterator[None]:
        """Checks all values. Yields regularly so that the caller can pause. Raises BadRequest if a
        value exceeds a limit.
        """
        self._check_lengths(fields)
        n = 0
        for name, field in _fields(fields):
            level = [field]
            while level:
                value = level.pop()
                n += 1
                if n % _AT_ONCE == 0:
                    yield
                if isinstance(value, str):
                    _check_text(name, value)
                elif isinstance(value, int | float):
                    _check_number(name, value)
                elif isinstance(value, dict):
                    level += chain(value, value.values())
                elif isinstance(value, list | tuple | set | frozenset):
                    level += value
                else:
                    level += (one for _name, one in _fields(value))

    def refuse(self, fields: Any) -> None:
        """Checks a request or SamplingParams like `check`, but without pauses."""
        for _ in self.check(fields):
            pass

    def refuse_foreign(self, prompt: Any, params: Any) -> None:
        """Raises BadRequest for token ids outside the vocabulary. vLLM checks only some fields."""
        if isinstance(prompt, dict) and prompt.get("type") == "token":
            ids = prompt["prompt_token_ids"]
            refuse_foreign("prompt", (min(ids), max(ids)) if ids else (), self.n_ids)
        for param in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            refuse_foreign(param, getattr(params, param, None) or (), self.n_ids)

    def refuse_tokens(self, params: Any) -> None:
        """Checks fields that vLLM has filled in later. Raises BadRequest if a value exceeds a
        limit.
        """
        words = getattr(params, "bad_words_token_ids", None) or ()
        _check_length("bad_words", words, self.bad_words, "words, with and without a space before")
        if sum(map(len, words)) > self.bad_words_tokens:
            raise BadRequest(
                f"bad_words may have {self.bad_words_tokens} tokens in all words together.",
                "bad_words",
            )
        refuse_foreign("bad_words", chain.from_iterable(words), self.n_ids)
        for name in ("max_tokens", "min_tokens"):
            if (getattr(params, name, None) or 0) > self.tokens:
                raise BadRequest(f"{name} may be {self.tokens} at most.", name)
        if getattr(params, "min_tokens", 0):
            _check_length(
                "stop_token_ids",
                getattr(params, "all_stop_token_ids", ()),
                self.stop_token_ids,
                "ids where min_tokens is set, the model's own among them",
            )

    def _check_lengths(self, fields: Any) -> None:
        for name, what in (
            ("allowed_token_ids", "ids"),
            ("logit_bias", "entries"),
            ("bad_words", "words"),
            ("stop", "texts"),
        ):
            value = getattr(fields, name, None)
            if not isinstance(value, str):
                _check_length(name, value, getattr(self, name), what)
        repeats = getattr(fields, "repetition_detection", None)
        size, count = (getattr(repeats, name, 0) for name in ("max_pattern_size", "min_count"))
        if size * size * count > self.repetition_detection:
            raise BadRequest(
                "repetition_detection may have max_pattern_size x max_pattern_size x min_count of"
                f" {self.repetition_detection} at most; this has {size} x {size} x {count}.",
                "repetition_detection",
            )
        words = getattr(fields, "bad_words", None) or ()
        most = TOKEN_CHARS * self.bad_words_tokens
        if sum(map(len, words)) > most:
            raise BadRequest(f"bad_words may have {most} characters together.", "bad_words")
        ranges = {
            "seed": (_LEAST, 2**63 - (getattr(fields, "n", None) or 1)),  # one for each answer
            "length_penalty": (-_LENGTH_PENALTY, _LENGTH_PENALTY),
            "thinking_token_budget": (_LEAST, self.thinking_token_budget),
        }
        for name, (least, most) in ranges.items():
            value = getattr(fields, name, None)
            if isinstance(value, int | float) and not least <= value <= most:
                raise BadRequest(f"{name} must be {least} to {most}.", name)


def _check_length(name: str, value: Any, most: int, what: str) -> None:
    if isinstance(value, Sized) and len(value) > most:
        raise BadRequest(f"{name} may have {most} {what}; this has {len(value)}.", name)


def _check_text(name: str, value: str) -> None:
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name} has half a surrogate pair, which is no text.", name) from None


def _check_number(name: str, value: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{name} must have finite numbers only, not NaN or Infinity.", name)
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise BadRequest(
            f"{name} has an integer of more than 64 bits: {_LEAST} to {_MOST} are possible.", name
        )


def _fields(value: Any) -> Iterable[tuple[str, Any]]:
    """Returns (name, value) of each field of a msgspec, pydantic or dataclass object."""
    kind = type(value)
    if names := getattr(kind, "__struct_fields__", None):
        return ((name, getattr(value, name)) for name in names if name not in _ELSEWHERE)
    if hasattr(kind, "model_fields") or hasattr(kind, "__dataclass_fields__"):
        return chain(vars(value).items(), (getattr(value, "model_extra", None) or {}).items())
    return ()
