"""How often a validation errs, in both directions, and by which rule it errs least.

A validation counts which of n nonces lie further off than a threshold and asks how likely an honest
sender has so many (protocol.md, sections 2 and 8.3). So both errors follow exactly from the
binomial distribution and two shares beyond the threshold: an honest machine's and a cheat's.
Offsets are L2 distances of artifacts or margins of chains; shares and risks are from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from poc_core.arithmetic.statistics import at_least, at_most, least_frauds

# Nonces that a validation checks at most; more than any request may hold say little more.
MOST_NONCES = 10_000
# Shares of honest nonces beyond a threshold that are tried.
_TRIED_SHARES = [0.0, *np.geomspace(0.001, 0.5, 24)]
# Validations that are drawn to find a test's power.
_DRAWS = 2000


@dataclass(frozen=True)
class Sample:
    """Offsets of one comparison's nonces."""

    name: str
    offsets: npt.NDArray[np.float64]  # (n,), ascending

    def n_beyond(self, threshold: float) -> int:
        return len(self.offsets) - int(np.searchsorted(self.offsets, threshold, side="right"))

    def threshold_for(self, share: float) -> float:
        """The smallest offset beyond which at most this share of the nonces lies."""
        return float(self.offsets[len(self.offsets) - 1 - math.floor(share * len(self.offsets))])


@dataclass(frozen=True)
class Rule:
    """Parameters of a validation of n nonces (protocol.md, section 2, Validation)."""

    dist_threshold: float
    p_mismatch: float
    fraud_threshold: float
    n: int

    @property
    def least_frauds(self) -> int:
        """The fewest mismatches that count as fraud."""
        return int(least_frauds(self.n, self.p_mismatch, self.fraud_threshold))


@dataclass(frozen=True)
class Shares:
    """Shares of the nonces that mismatch."""

    honest: float  # of the two honest machines that disagree most
    cheat: float  # of the cheat that is found out least
    honest_name: str
    cheat_name: str


@dataclass(frozen=True)
class Risks:
    false_alarm: float  # an honest machine is called a fraud
    miss: float  # a cheat is not


@dataclass(frozen=True)
class Evidence:
    """Samples of honest machines and of cheats, which tamper with `tampered_share` of their nonces.

    A threshold must hold for each pair of machines, so the worst sample counts, not the mean.
    """

    honest: Sequence[Sample]
    tampered: Sequence[Sample]
    tampered_share: float = 1.0

    def shares(self, threshold: float, at_worst: bool = False) -> Shares:
        """Shares beyond the threshold, as counted or, at worst, as not excluded by the counts."""
        upper = at_most if at_worst else _share
        lower = at_least if at_worst else _share
        honest = [
            (upper(sample.n_beyond(threshold), len(sample.offsets)), sample.name)
            for sample in self.honest
        ]
        honest_part = min(
            lower(sample.n_beyond(threshold), len(sample.offsets)) for sample in self.honest
        )
        cheats = [
            (lower(sample.n_beyond(threshold), len(sample.offsets)), sample.name)
            for sample in self.tampered
        ]
        (most, honest_name), (least, cheat_name) = max(honest), min(cheats)
        cheat = self.tampered_share * least + (1 - self.tampered_share) * honest_part
        return Shares(most, cheat, honest_name, cheat_name)

    def risks(self, rule: Rule, at_worst: bool = False) -> Risks:
        from scipy.stats import binom

        shares = self.shares(rule.dist_threshold, at_worst)
        most_passed = rule.least_frauds - 1
        return Risks(
            false_alarm=float(binom.sf(most_passed, rule.n, shares.honest)),
            miss=float(binom.cdf(most_passed, rule.n, shares.cheat)),
        )


@dataclass(frozen=True)
class Recommendation:
    rule: Rule
    kept: bool  # whether both risks stay, at worst, within what was asked for


@dataclass(frozen=True)
class Power:
    """How often a test of n nonces finds each cheat, by its name."""

    test: str
    n: int
    risk: float  # how often it calls an honest machine a cheat, at most
    found: Mapping[str, float]


def powers(
    evidence: Evidence, thresholds: Sequence[float], n: int, risk: float, seed: int = 0
) -> list[Power]:
    """Tests of n nonces beside the count over a threshold, which alone is the network's verdict.

    Each test is the mean of a score of every offset, and finds a cheat where it is above what the
    honest machine that disagrees most has in all but `risk` of the cases. Scores are whether the
    offset is over a threshold, the offset, and its rank among all honest ones (a rank-sum test).
    All are simulated, drawing from the samples, so nothing below a share of 1 / _DRAWS is known.
    """
    chance = np.random.default_rng(seed)
    known = np.sort(np.concatenate([sample.offsets for sample in evidence.honest]))
    scores: dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[Any]]] = {
        **{f"count over {one:g}": partial(np.less, one) for one in thresholds},
        "mean": lambda offsets: offsets,
        "ranks": lambda offsets: np.searchsorted(known, offsets),
    }

    def means(score: npt.NDArray[Any], of_honest: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the means of _DRAWS validations; `of_honest`: scores of untampered nonces."""
        drawn = chance.choice(score, (_DRAWS, n))
        if evidence.tampered_share < 1 and score is not of_honest:
            kept = chance.random((_DRAWS, n)) >= evidence.tampered_share
            drawn = np.where(kept, chance.choice(of_honest, (_DRAWS, n)), drawn)
        return np.asarray(drawn.mean(axis=1))

    found = []
    nearest = min(evidence.honest, key=lambda sample: float(sample.offsets.mean()))
    for name, score in scores.items():
        honest = [score(sample.offsets) for sample in evidence.honest]
        limit = max(np.quantile(means(one, one), 1 - risk, method="higher") for one in honest)
        shares = {
            sample.name: float(
                np.mean(means(score(sample.offsets), score(nearest.offsets)) > limit)
            )
            for sample in evidence.tampered
        }
        found.append(Power(name, n, risk, shares))
    return found


def recommend(
    evidence: Evidence, fraud_threshold: float, most_miss: float, n: int | None = None
) -> Recommendation:
    """The rule that keeps both risks, at worst, with the fewest nonces (or `n`, missing least).

    p_mismatch is the largest share of honest mismatches that the samples do not exclude, so that
    false alarms stay below fraud_threshold whatever n is. Where no n keeps the misses below
    most_miss: the rule of MOST_NONCES that misses least.
    """
    tried = _candidates(evidence, fraud_threshold)
    if n is None:
        counts = [_nonces_needed(evidence, rule, most_miss) for rule in tried]
        possible = [
            replace(rule, n=count)
            for rule, count in zip(tried, counts, strict=True)
            if count is not None
        ]
        if possible:
            return Recommendation(min(possible, key=lambda rule: rule.n), kept=True)
    given = [replace(rule, n=n or MOST_NONCES) for rule in tried]
    miss, best = min(
        ((evidence.risks(rule, at_worst=True).miss, rule) for rule in given),
        key=lambda risk: risk[0],
    )
    return Recommendation(best, kept=miss <= most_miss)


def _candidates(evidence: Evidence, fraud_threshold: float) -> list[Rule]:
    """Rules to try, the largest threshold first; thresholds between honest offsets find no more."""
    rules: dict[float, Rule] = {}
    for share in _TRIED_SHARES:
        threshold = _rounded_up(max(sample.threshold_for(share) for sample in evidence.honest), 3)
        p_mismatch = _rounded_up(evidence.shares(threshold, at_worst=True).honest, 2)
        if p_mismatch < 1:
            rules.setdefault(threshold, Rule(threshold, p_mismatch, fraud_threshold, MOST_NONCES))
    return list(rules.values())


def _nonces_needed(evidence: Evidence, rule: Rule, most_miss: float) -> int | None:
    """Nonces needed to miss a cheat at most so often, at worst; None: more than MOST_NONCES."""
    from scipy.stats import binom

    cheat = evidence.shares(rule.dist_threshold, at_worst=True).cheat
    if cheat <= rule.p_mismatch:
        return None  # the cheat is as good as an honest machine, however many nonces
    counts = np.arange(1, MOST_NONCES + 1)
    fewest = least_frauds(counts, rule.p_mismatch, rule.fraud_threshold)
    too_often = np.flatnonzero(binom.cdf(fewest - 1, counts, cheat) > most_miss)
    needed = 1 if not len(too_often) else int(counts[too_often[-1]]) + 1
    return needed if needed <= MOST_NONCES else None


def _share(n_found: int, n_total: int) -> float:
    return n_found / n_total


def _rounded_up(number: float, digits: int) -> float:
    """A number rounded up to so many significant digits, as a request may hold it."""
    if number <= 0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(number))
    return float(round(math.ceil(round(number * 10.0**places, 6)) / 10.0**places, max(places, 0)))
