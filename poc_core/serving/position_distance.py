"""The distance of two answers' logprobs at one position (protocol.md, section 9)."""

import math
from collections.abc import Mapping
from typing import Any

# vLLM's logprob of a probability of 0.
NEVER = -9999.0


def position_distance(executor: Mapping[Any, float], validator: Mapping[Any, float]) -> float:
    """Returns the distance of two answers at one position, from 0 to 0.5. `executor`, `validator`:
    the logprobs of each answer's best tokens. If the executor lacks a token of the validator, the
    token's logprob is extrapolated from the executor's two lowest logprobs.
    """
    if not executor or not validator:
        return 0.5
    # Entries beyond the validator's width are padding.
    executor = dict(list(executor.items())[: len(validator)])
    lowest, *others = sorted(executor.values())
    missing = lowest - ((others[0] if others else lowest - 100.0) - lowest)
    terms = [_term(a, executor.get(token, missing)) for token, a in validator.items()]
    return sum(terms) / len(terms)


def _term(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.5
    return abs(a - b) / (1e-6 + abs(a) + abs(b)) / 2
