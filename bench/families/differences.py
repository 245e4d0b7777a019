"""Differences between two ways of computing, and the variation of equal runs of one engine.

Some kernels (sparse attention's choice of tokens, some mixtures of experts) add in the order in
which their threads arrive, so their results vary. A difference that equal runs show too is no fault
of either way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.harness import golden

# Largest ratio of a difference to the variation of a few equal runs.
_MARGIN = 3.0
# The difference of two equally likely tokens, which must not count as 0.
_TIE = 1e-6


class Difference(NamedTuple):
    """The result of one check, in the unit of that check."""

    seen: float
    again: float  # between equal runs; 0 if the engine is bit-reproducible

    @property
    def exact(self) -> bool:
        return self.seen == 0.0

    @property
    def right(self) -> bool:
        """Returns whether the difference is within the engine's own variation."""
        return self.seen <= _MARGIN * self.again

    def __str__(self) -> str:
        if self.exact and self.again == 0.0:
            return "same"
        word = "DIFFERENT" if not self.right else "not deterministic" if self.again else "same"
        return f"{self.seen:.4g} ({word}, again {self.again:.4g})"


class Answer(NamedTuple):
    """The answer to a greedy request."""

    tokens: list[int]
    logprobs: list[float]  # of each token; empty if not requested
    cached: int = 0  # tokens of the prompt found in the prefix cache


def of_values(seen: Sequence[Any], expected: Sequence[Any]) -> float:
    """Returns the largest L2 between artifacts; inf if one is missing."""
    if list(seen) == list(expected):
        return 0.0
    if len(seen) != len(expected) or None in seen or None in expected:
        return float("inf")
    return float(golden.l2(list(seen), list(expected), 12).max())


def of_answers(seen: Answer, expected: Answer) -> float:
    """Returns the largest difference of log probabilities up to the first different token.

    Later tokens have another context. Without log probabilities: the share of tokens from the first
    different one on.
    """
    pairs = zip(seen.tokens, expected.tokens, strict=True)
    other = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
    if not (seen.logprobs and expected.logprobs):
        return 0.0 if other is None else 1.0 - other / len(expected.tokens)
    compared = slice(None if other is None else other + 1)
    numbers = zip(seen.logprobs[compared], expected.logprobs[compared], strict=True)
    largest = max(abs(one - two) for one, two in numbers)
    return largest if other is None else max(largest, _TIE)
