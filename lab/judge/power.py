"""Computes how often a validation errs in both directions, and finds the rule with the fewest
errors.

A validation counts how many of n nonces are beyond a threshold, and computes the probability of so
many for an honest sender (protocol.md, sections 2 and 8.3). So both errors follow exactly from the
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

from lab.judge.statistics import at_least, at_most, least_frauds

# Most nonces of a validation that are considered; more nonces add little certainty.
MOST_NONCES = 10_000
# Shares of honest nonces beyond a threshold that are tried.
_TRIED_SHARES = [0.0, *np.geomspace(0.001, 0.5, 24)]
# Simulated validations for each power of a test.
_DRAWS = 2000


@dataclass(frozen=True)
class Sample:
    """Offsets of one comparison's nonces."""

    name: str
    offsets: npt.NDArray[np.float64]  # (n,), ascending

    def n_beyond(self, threshold: float) -> int:
        return len(self.offsets) - int(np.searchsorted(self.offsets, threshold, side="right"))

    def threshold_for(self, share: float) -> float:
        """Returns the smallest offset so that at most `share` of the nonces have a larger one."""
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
        """Returns the lowest number of mismatches that counts as fraud."""
        return int(least_frauds(self.n, self.p_mismatch, self.fraud_threshold))


@dataclass(frozen=True)
class Shares:
    """The shares of honest and of a cheat's nonces beyond a threshold, and the machines with these
    shares.
    """

    honest: float  # of the two honest machines that differ most
    cheat: float  # of the cheat that is hardest to detect
    honest_name: str
    cheat_name: str


@dataclass(frozen=True)
class Risks:
    false_alarm: float  # an honest machine is judged a fraud
    miss: float  # a cheat is not judged a fraud


@dataclass(frozen=True)
class Evidence:
    """Measured offsets of honest machines and of cheats. A cheat tampers with `tampered_share` of
    its nonces.

    A threshold must hold for each pair of machines, so the worst sample counts, not the mean.
    """

    honest: Sequence[Sample]
    tampered: Sequence[Sample]
    tampered_share: float = 1.0

    def shares(self, threshold: float, at_worst: bool = False) -> Shares:
        """Returns the shares beyond the threshold: as counted, or with `at_worst` the confidence
        bounds of the counts.
        """
        upper = at_most if at_worst else _share
        lower = at_least if at_worst else _share

        def bound(of: Callable[[int, int], float], sample: Sample) -> float:
            return of(sample.n_beyond(threshold), len(sample.offsets))

        honest = [(bound(upper, sample), sample.name) for sample in self.honest]
        honest_part = min(bound(lower, sample) for sample in self.honest)
        cheats = [(bound(lower, sample), sample.name) for sample in self.tampered]
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
    kept: bool  # whether both risks are, at worst, within the requested limits


@dataclass(frozen=True)
class Power:
    """How often a test of n nonces detects each cheat, by the cheat's name."""

    test: str
    n: int
    risk: float  # highest rate of false alarms for an honest machine
    found: Mapping[str, float]


def powers(
    evidence: Evidence, thresholds: Sequence[float], n: int, risk: float, seed: int = 0
) -> list[Power]:
    """Simulates three kinds of tests of n nonces; the network uses only the first, a count over a
    threshold.

    Each test averages a score of every offset, and detects a cheat if the average exceeds the limit
    that the most deviant honest machine exceeds in only `risk` of the cases. Scores are: whether
    the offset is over a threshold, the offset itself, and its rank among all honest ones (a
    rank-sum test). All draw from the samples, so rates below 1 / _DRAWS cannot be measured.
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
    """Returns the rule that keeps both risks below their limits with the fewest nonces, or with `n`
    nonces. Risks are computed from the confidence bounds.

    p_mismatch is the largest share of honest mismatches that the samples do not exclude, so that
    false alarms stay below fraud_threshold for any n. If no n keeps misses below most_miss, returns
    the rule with MOST_NONCES and the fewest misses.
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
    """Returns the rules to try, the largest threshold first. The thresholds are honest offsets,
    rounded up, because a threshold between two offsets detects no more.
    """
    rules: dict[float, Rule] = {}
    for share in _TRIED_SHARES:
        threshold = _rounded_up(max(sample.threshold_for(share) for sample in evidence.honest), 3)
        p_mismatch = _rounded_up(evidence.shares(threshold, at_worst=True).honest, 2)
        if p_mismatch < 1:
            rules.setdefault(threshold, Rule(threshold, p_mismatch, fraud_threshold, MOST_NONCES))
    return list(rules.values())


def _nonces_needed(evidence: Evidence, rule: Rule, most_miss: float) -> int | None:
    """Returns the fewest nonces with which a cheat is missed at most at the rate `most_miss`, by
    the confidence bounds; None if MOST_NONCES do not suffice.
    """
    from scipy.stats import binom

    cheat = evidence.shares(rule.dist_threshold, at_worst=True).cheat
    if cheat <= rule.p_mismatch:
        return None  # the cheat mismatches no more than an honest machine, for any number of nonces
    counts = np.arange(1, MOST_NONCES + 1)
    fewest = least_frauds(counts, rule.p_mismatch, rule.fraud_threshold)
    too_often = np.flatnonzero(binom.cdf(fewest - 1, counts, cheat) > most_miss)
    needed = 1 if not len(too_often) else int(counts[too_often[-1]]) + 1
    return needed if needed <= MOST_NONCES else None


def _share(n_found: int, n_total: int) -> float:
    return n_found / n_total


def _rounded_up(number: float, digits: int) -> float:
    """Rounds a number up to `digits` significant digits."""
    if number <= 0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(number))
    return float(round(math.ceil(round(number * 10.0**places, 6)) / 10.0**places, max(places, 0)))
