"""The network's rules for comparing an executor's chat answer with a validator's (protocol.md,
section 9).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from poc_core.serving.position_distance import NEVER, position_distance

# The `content` of an answer's logprobs: token, logprob and top_logprobs of each position.
Content = Sequence[Mapping[str, Any]]

# An answer is valid if its similarity is above the threshold. The keys are the beginnings of model
# names without the owner.
THRESHOLDS = {
    "glm-5.3-flash": 0.951,
    "minimax-m2.7": 0.922,
    "deepseek-v4-flash": 0.900,
    "kimi-k2.6": 0.900,
    "glm-5.2": 0.750,
}
# The threshold of models for which the network defines none.
DEFAULT_THRESHOLD = 0.900
# Models whose single positions are also checked; for other models they are only logged.
CALIBRATED = ("deepseek-v4-flash", "glm-5.3-flash")

# Entries that the network requests for a position, including the chosen token's entry.
_BEST = 5
# The mean distance of N positions is reduced by _ALLOWANCE / sqrt(N) ...
_ALLOWANCE = 0.10
# ... but is at least the sum divided by max(N, _LEAST_POSITIONS).
_LEAST_POSITIONS = 100
# Claimed input or output tokens may exceed the validator's count by this number.
_SPARE_TOKENS = 3

# A position with a distance above FAR is far. Allowed are a share of all positions, and with
# processed logprobs at least _FAR_ANYWAY positions.
FAR = 0.30
_FAR_SHARE = 0.02
_FAR_ANYWAY = 3
# Allowed tokens that the validator's sampler cannot produce: a share of all positions (a larger
# share with a narrow sampler), and at least _NEVER_ANYWAY.
_NEVER_SHARE = 0.03
_NEVER_SHARE_NARROW = 0.50
_NEVER_ANYWAY = 1
# A sampler with values below these, or with min_p, is narrow.
_NARROW_TOP_K = 40
_NARROW_TOP_P = 0.95

PASS = "pass"
NOT_IDS = "tokens are no ids"
TOO_FEW = "fewer entries at a position than requested"
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
    """The rules by which the logprobs of an executor and a validator are compared."""

    threshold: float
    processed: bool = True  # logprobs are those after the sampler's arithmetic
    narrow: bool = False  # the sampler is narrower than those used to find the constants
    calibrated: bool = True  # single positions are checked too

    @classmethod
    def of(
        cls, model: str, request: Mapping[str, Any], mode: str, threshold: float | None = None
    ) -> Self:
        """Returns the rules for a chat request and the name under which its model is served.

        `mode`: the logprobs_mode of both answers. `threshold`: used instead of the model's
        threshold.
        """
        return cls(
            threshold=threshold_of(model) if threshold is None else threshold,
            processed=mode.startswith("processed"),
            narrow=is_narrow(request),
            calibrated=_bare(model).startswith(CALIBRATED),
        )


@dataclass(frozen=True)
class Verdict:
    """The network's verdict on an executor's chat answer."""

    distances: list[float]  # of each position that both answers have
    legacy_similarity: float | None  # by the network's current rule; None if the lengths differ
    similarity: float | None  # None if the answer is invalid for another reason
    reason: str

    @property
    def is_valid(self) -> bool:
        return self.reason == PASS


def compare(executor: Content, validator: Content, rules: Rules) -> Verdict:
    """Compares the logprobs of an executor and a validator for the same tokens, and returns the
    verdict (protocol.md, section 9.2).
    """
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
    """Returns True if an executor reports over _SPARE_TOKENS more prompt or completion tokens than
    the validator counted.
    """
    return any(
        claimed.get(name, 0) > counted.get(name, 0) + _SPARE_TOKENS
        for name in ("prompt_tokens", "completion_tokens")
    )


def has_ids(content: Content) -> bool:
    """Returns True if all tokens are written as decimal token ids, as the network requires."""
    names = {name for one in content for name in (one["token"], *entries(one))}
    return all(name.isascii() and name.isdecimal() for name in names)


def malformed(content: Content, n_best: int = _BEST) -> str | None:
    """Returns what is wrong with the form of an executor's logprobs; None if the form is valid
    (protocol.md, section 9.1).

    `n_best`: how many tokens per position the request asked for.
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
    """Returns the logprobs of the most likely tokens at a position, by token. They include the
    chosen token.
    """
    return {one["token"]: one["logprob"] for one in position["top_logprobs"]}


def _similarity(distance: float) -> float:
    return max(0.0, 1 - distance)


def threshold_of(model: str) -> float:
    """Returns the similarity above which answers of a model are valid. `model`: the name, with or
    without owner.
    """
    found = [one for name, one in THRESHOLDS.items() if _bare(model).startswith(name)]
    return found[0] if found else DEFAULT_THRESHOLD


def is_narrow(request: Mapping[str, Any]) -> bool:
    """Returns True if top_k, top_p or min_p of a request let it sample from fewer tokens than the
    requests from which this module's constants were derived.
    """
    top_k, top_p, min_p = (
        one if isinstance(one := request.get(name), int | float) else usual
        for name, usual in (("top_k", 0), ("top_p", 1), ("min_p", 0))
    )
    return 1 <= top_k < _NARROW_TOP_K or top_p < _NARROW_TOP_P or min_p > 0


def _bare(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()
