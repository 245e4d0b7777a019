"""How far what was done in another way lies from what it should be, told apart from how far an
engine lies from itself.

Kernels that add in the order in which their threads arrive (sparse attention's choice of tokens,
some mixtures of experts) give other bits each time. A difference that two runs show which were
alike is no fault of what was done between them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.harness import golden

# As many times as an engine lies from itself in a few runs another few may lie apart.
_MARGIN = 3.0
# Of two tokens that are as likely: not nothing.
_TIE = 1e-6


class Difference(NamedTuple):
    """Of one check; no numbers of two checks are of one kind."""

    seen: float
    again: float  # between runs that were alike; 0: the engine repeats itself bit for bit

    @property
    def exact(self) -> bool:
        return self.seen == 0.0

    @property
    def right(self) -> bool:
        """Nothing, or no more than what the engine does by itself."""
        return self.seen <= _MARGIN * self.again

    def __str__(self) -> str:
        if self.exact and self.again == 0.0:
            return "same"
        word = "DIFFERENT" if not self.right else "not deterministic" if self.again else "same"
        return f"{self.seen:.4g} ({word}, again {self.again:.4g})"


class Answer(NamedTuple):
    """Of a greedy request."""

    tokens: list[int]
    logprobs: list[float]  # of each; empty: not asked for
    cached: int = 0  # of the prompt: found in the prefix cache


def of_values(seen: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest L2 of artifacts from what they should be: infinite where one is missing."""
    if list(seen) == list(expected):
        return 0.0
    if len(seen) != len(expected) or None in seen or None in expected:
        return float("inf")
    return float(golden.l2(list(seen), list(expected), 12).max())


def of_answers(seen: Answer, expected: Answer) -> float:
    """The largest difference of tokens' log probabilities up to the first token that is another
    one, as what follows it has another context. Without log probabilities: the share of tokens
    from that one on.
    """
    pairs = zip(seen.tokens, expected.tokens, strict=True)
    other = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
    if not (seen.logprobs and expected.logprobs):
        return 0.0 if other is None else 1.0 - other / len(expected.tokens)
    compared = slice(None if other is None else other + 1)
    numbers = zip(seen.logprobs[compared], expected.logprobs[compared], strict=True)
    largest = max(abs(one - two) for one, two in numbers)
    return largest if other is None else max(largest, _TIE)
