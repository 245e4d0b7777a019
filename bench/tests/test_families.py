"""The model matrix tells a fault from an engine that gives other bits each time."""

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import JsonValue

import workers.engines.base
from bench.families import checks, look, make
from bench.families.differences import Answer, Difference, of_answers, of_values
from poc_core.records import ModelInfo
from poc_core.schemes.artifact.encoding import encode_vectors
from workers.engines.base import Slice, Tick, TickResult


def artifacts(off: float) -> list[JsonValue]:
    """Whose vectors lie `off` from those of artifacts(0)."""
    vectors = np.zeros((len(checks.NONCES), 12))
    vectors[:, 0] += off
    return list(encode_vectors(vectors))


class Engine(workers.engines.base.Engine):
    """One whose values lie off by one of `offs` after the other, by `sliced` layer by layer, by
    `private` with private caches and by `beside` beside chat; its answers have a token with one
    of `logprobs` after the other.
    """

    def __init__(
        self,
        offs: Sequence[float] = (0.0,),
        sliced: float = 0.0,
        private: float = 0.0,
        beside: float = 0.0,
        logprobs: Sequence[float] = (-1.0,),
        caches: str = "shared",
    ) -> None:
        self.info = ModelInfo("m", 256, 2, 4096, 8192, "float32", layers="layers", caches=caches)
        self.stages = [range(2)]
        self._offs, self._logprobs = cycle(offs), cycle(logprobs)
        self._sliced, self._private, self._beside, self._is_private = sliced, private, beside, False

    def settle(self, private: bool, replicated: bool) -> None:
        self._is_private = private

    def tick(self, tick: Tick) -> TickResult:
        (one,) = tick.slices
        return TickResult({}, [], {one.micro_batch: self._values(one)} if one.end == 2 else {})

    def _values(self, last: Slice) -> list[JsonValue]:
        if last.micro_batch >= checks.FIRST_ID:
            off = self._beside
        else:
            off = next(self._offs) if last.first == 0 else self._sliced
        return artifacts(off + (self._private if self._is_private else 0))

    def close(self) -> None: ...

    def ask(
        self, _engine: Any, prompt: int = 0, n_tokens: int = 8, logprobs: bool = False
    ) -> "Future[Answer]":
        done: Future[Answer] = Future()
        number = next(self._logprobs)
        done.set_result(Answer([1 + (number < -1.5)], [number] if logprobs else []))
        return done


def seen_of(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, family: str = "qwen3"
) -> dict[str, Any]:
    monkeypatch.setattr(checks, "ask", engine.ask)
    return look.checked(engine, SimpleNamespace(), family, with_opinion=False)


def test_an_engine_that_repeats_itself_is_the_same_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_of(Engine(), monkeypatch)
    assert seen.pop("right")
    assert [seen[name] for name in ("shared", "slices", "chat", "beside chat")] == ["same"] * 4


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ({"sliced": 0.5}, "slices"),
        ({"private": 0.5}, "shared"),
        ({"beside": 0.5}, "beside chat"),
        ({"logprobs": [-1.0, -1.0, -2.0]}, "chat"),
    ],
    ids=lambda what: what if isinstance(what, str) else "",
)
def test_a_difference_of_an_engine_that_repeats_itself_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], name: str
) -> None:
    if name == "chat":  # alone, between two slices, beside them; then alone five times and so on
        fault = {"logprobs": [-1.0, -1.0, -2.0, -1.0, *[-1.0] * 5, -1.0, -2.0, -1.0]}
    seen = seen_of(Engine(**fault), monkeypatch)
    assert not seen["right"]
    assert [key for key, word in seen.items() if "DIFFERENT" in str(word)] == [name]


def test_one_that_does_not_is_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_of(
        Engine([0.0, 0.01], sliced=0.02, beside=0.02, logprobs=[-1.0, -2.0, -1.4]), monkeypatch
    )
    assert seen["right"]
    assert seen["slices"] == "0.02 (not deterministic, again 0.01)"
    assert "not deterministic" in seen["chat"]
    assert "not deterministic" in seen["beside chat"]


def test_what_is_further_off_than_that_is_a_fault_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = seen_of(Engine([0.0, 0.01], sliced=0.5), monkeypatch)
    assert not seen["right"]
    assert "DIFFERENT" in seen["slices"]


def test_values_that_are_missing_are_infinitely_far() -> None:
    assert of_values([None], artifacts(0.0)[:1]) == float("inf")
    assert of_values([None], [None]) == 0.0
    assert not Difference(float("inf"), 0.1).right


def test_answers_are_compared_up_to_the_first_other_token() -> None:
    alone = Answer([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])
    assert of_answers(alone, alone) == 0.0
    assert of_answers(Answer([5, 9, 9, 9], [-1.0, -2.25, -9.0, -9.0]), alone) == 0.25
    # As likely, and another token.
    assert of_answers(Answer([5, 9, 7, 8], [-1.0, -2.0, -3.0, -4.0]), alone) > 0
    assert of_answers(Answer([5, 9, 9, 9], []), alone) == 0.75


FLIPPED = np.array([0.0069, 0.0083, 0.0051, 0.0074, 0.2046])


@pytest.mark.parametrize(
    ("errors", "dtype", "with_experts", "agrees"),
    [
        (FLIPPED, "bfloat16", True, True),
        (np.array([0.2, 0.2, 0.01, 0.01, 0.01]), "bfloat16", True, False),
        (np.array([0.04, 0.059]), "bfloat16", False, True),
        (FLIPPED * 2, "bfloat16", False, False),
        (np.array([0.0, 0.0, 0.0, 0.1]), "float32", True, True),
        (np.array([0.0, 0.0, 0.0, 0.1]), "float32", False, False),
    ],
)
def test_a_router_may_flip_and_the_mean_of_others_counts(
    errors: np.ndarray, dtype: str, with_experts: bool, agrees: bool
) -> None:
    assert look.agree(errors, dtype, with_experts)[0] is agrees


def test_a_model_in_8_bits_is_asked_of_transformers_with_the_same_numbers() -> None:
    name, other = "layers.0.attn.wo_b.weight", "layers.0.ffn.gate.weight"
    weights = {name: torch.randn(256, 128).bfloat16(), other: torch.randn(8, 128).bfloat16()}
    in_8_bits = make.in_8_bits(weights)
    assert (in_8_bits[name].dtype, in_8_bits[other].dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    back = make.from_8_bits(in_8_bits)
    assert back.keys() == weights.keys()
    assert torch.equal(back[other], weights[other])
    largest = weights[name].float().abs().max()
    torch.testing.assert_close(
        back[name].float(), weights[name].float(), rtol=2**-4, atol=float(largest) * 2**-9
    )
    again = make.from_8_bits(make.in_8_bits(back))  # they are numbers of 8 bits now
    torch.testing.assert_close(again[name].float(), back[name].float(), rtol=2**-7, atol=0)
