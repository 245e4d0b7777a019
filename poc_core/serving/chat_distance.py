"""The network's comparison of two chats, by which a validator judges an executor (protocol.md,
section 9): constants, the distance of each position, the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The content of an answer's logprobs: per position token, logprob and top_logprobs.
Content = Sequence[Mapping[str, Any]]

# Least similarity of a valid answer, which must be above it; by the beginning of the model's name
# without its owner.
THRESHOLDS = {
    "glm-5.3-flash": 0.951,
    "minimax-m2.7": 0.922,
    "deepseek-v4-flash": 0.900,
    "kimi-k2.6": 0.900,
    "glm-5.2": 0.750,
}
# Of models that the network has not named one for.
DEFAULT_THRESHOLD = 0.900
# Their single positions are judged too; those of other models are only logged.
CALIBRATED = ("deepseek-v4-flash", "glm-5.3-flash")

# Entries that the network asks for at a position, the token's own among them.
_BEST = 5
# What vLLM writes for a probability of 0.
NEVER = -9999.0
# A mean of N positions may be further by this / sqrt(N) ...
_ALLOWANCE = 0.10
# ... but is never nearer than their sum over so many.
_LEAST_POSITIONS = 100
# Claimed tokens of input or output above the validator's own that are still accepted.
_SPARE_TOKENS = 3

# A position above it is far; so many of N may be, and so many in any answer of processed logprobs.
FAR = 0.30
_FAR_SHARE = 0.02
_FAR_ANYWAY = 3
# Tokens that the validator's sampler cannot give: so many of N may be, and so many in any answer.
_NEVER_SHARE = 0.03
_NEVER_SHARE_NARROW = 0.50
_NEVER_ANYWAY = 1
# Samplers below these are narrow, and those with min_p.
_NARROW_TOP_K = 40
_NARROW_TOP_P = 0.95

PASS = "pass"
NOT_IDS = "tokens are no ids"
TOO_FEW = "fewer entries at a position than asked for"
NOT_ITS_OWN = "a token's own number is not among its entries"
MISSPELT = "bytes do not spell the id"
REFUSED = "the tokens are refused"
DIFFERENT_LENGTH = "different_length"
DIFFERENT_TOKENS = "different_tokens"
CLAIMED_TOKENS = "more tokens claimed than used"
OUTSIDE_SUPPORT = "outside the sampler support"
FAR_POSITIONS = "positions far apart"
TOO_FAR = "similarity at or below the threshold"


@dataclass(frozen=True)
class Rules:
    """By which two contents are compared."""

    threshold: float
    processed: bool = True  # logprobs after the sampler's arithmetic
    narrow: bool = False  # the sampler is narrower than those the constants were found with
    calibrated: bool = True  # single positions are judged too

    @classmethod
    def of(
        cls, model: str, request: Mapping[str, Any], mode: str, threshold: float | None = None
    ) -> Rules:
        """Those of a model, by the name it is served under, and a request. `mode`: the
        logprobs_mode of both answers; `threshold`: another than the model's."""
        return cls(
            threshold=threshold_of(model) if threshold is None else threshold,
            processed=mode.startswith("processed"),
            narrow=is_narrow(request),
            calibrated=_bare(model).startswith(CALIBRATED),
        )


@dataclass(frozen=True)
class Verdict:
    """The network's verdict on an executor's answer."""

    distances: list[float]  # of each position that both have
    legacy_similarity: float | None  # by the rule of today; None: of another length
    similarity: float | None  # None: invalid whatever it is
    reason: str

    @property
    def is_valid(self) -> bool:
        return self.reason == PASS


def compare(executor: Content, validator: Content, rules: Rules) -> Verdict:
    """The verdict on an executor's content, by a validator's of the same tokens (protocol.md,
    section 9.2)."""
    n = len(executor)
    distances = [
        position_distance(entries(one), entries(other))
        for one, other in zip(executor, validator, strict=False)
    ]
    total = sum(distances)
    legacy = None
    if len(validator) == n:
        legacy = _similarity(total / max(n, _LEAST_POSITIONS))
    if reason := _why_invalid(executor, validator, distances, rules):
        return Verdict(distances, legacy, None, reason)
    mean = max(total / n - _ALLOWANCE / math.sqrt(n), total / max(n, _LEAST_POSITIONS)) if n else 0
    similarity = _similarity(mean)
    return Verdict(distances, legacy, similarity, PASS if similarity > rules.threshold else TOO_FAR)


def _why_invalid(
    executor: Content, validator: Content, distances: Sequence[float], rules: Rules
) -> str | None:
    n = len(executor)
    if len(validator) < n:
        return DIFFERENT_LENGTH
    pairs = list(zip(executor, validator, strict=False))
    if any(one["token"] != other["token"] for one, other in pairs):
        return DIFFERENT_TOKENS
    if not rules.calibrated:
        return None
    share = _NEVER_SHARE_NARROW if rules.narrow else _NEVER_SHARE
    n_never = sum(not other["logprob"] > NEVER for _, other in pairs)
    if rules.processed and n_never > max(_NEVER_ANYWAY, math.ceil(share * n)):
        return OUTSIDE_SUPPORT
    most_far = max(math.floor(_FAR_SHARE * n), _FAR_ANYWAY if rules.processed else 0)
    return FAR_POSITIONS if sum(one > FAR for one in distances) > most_far else None


def claims_too_much(claimed: Mapping[str, Any], counted: Mapping[str, Any]) -> bool:
    """True if an executor's usage is above a validator's by more than is accepted."""
    return any(
        claimed.get(name, 0) > counted.get(name, 0) + _SPARE_TOKENS
        for name in ("prompt_tokens", "completion_tokens")
    )


def has_ids(content: Content) -> bool:
    """True if all tokens are ids in decimal. Other answers are invalid, whatever they say."""
    names = {name for one in content for name in (one["token"], *entries(one))}
    return all(name.isascii() and name.isdecimal() for name in names)


def malformed(content: Content, n_best: int = _BEST) -> str | None:
    """What is wrong with an executor's logprobs, whatever their numbers (protocol.md, section 9.1).

    `n_best`: the entries that were asked for. None: nothing is wrong; else the answer is invalid.
    """
    if not has_ids(content):
        return NOT_IDS
    for one in content:
        if len(one["top_logprobs"]) < n_best:
            return TOO_FEW
        if entries(one).get(one["token"]) != one["logprob"]:
            return NOT_ITS_OWN
        if (spelt := one.get("bytes")) and bytes(spelt) != one["token"].encode():
            return MISSPELT
    return None


def entries(position: Mapping[str, Any]) -> dict[Any, float]:
    """Logprobs of a position's best tokens, its own among them."""
    return {one["token"]: one["logprob"] for one in position["top_logprobs"]}


def position_distance(executor: Mapping[Any, float], validator: Mapping[Any, float]) -> float:
    """How far two positions' entries are apart, 0 to 0.5.

    Of a token that the executor does not name, the number that would follow its lowest two.
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


def _similarity(distance: float) -> float:
    return max(0.0, 1 - distance)


def threshold_of(model: str) -> float:
    """That of a model by its name, with or without owner."""
    found = [one for name, one in THRESHOLDS.items() if _bare(model).startswith(name)]
    return found[0] if found else DEFAULT_THRESHOLD


def is_narrow(request: Mapping[str, Any]) -> bool:
    """True if a request's sampler is narrower than those the constants were found with."""
    top_k, top_p, min_p = (
        one if isinstance(one := request.get(name), int | float) else usual
        for name, usual in (("top_k", 0), ("top_p", 1), ("min_p", 0))
    )
    return 1 <= top_k < _NARROW_TOP_K or top_p < _NARROW_TOP_P or min_p > 0


def _bare(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()
