"""Computes how often a validation gives a wrong verdict, and finds the validation rule that needs
the fewest nonces.

A validation counts how many of n nonces lie beyond a threshold, and computes how likely an honest
sender would have at least as many (protocol.md, sections 2 and 8.3). The rates of false alarms and
misses follow from the binomial distribution and the shares of an honest machine's and of a cheat's
nonces beyond the threshold. An offset is the L2 distance of an artifact or the margin of a chain.
Shares and risks are from 0 to 1.
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
    """The offsets of all nonces in one comparison, for example of one machine with another."""

    name: str
    offsets: npt.NDArray[np.float64]  # (n,), ascending

    def n_beyond(self, threshold: float) -> int:
        return len(self.offsets) - int(np.searchsorted(self.offsets, threshold, side="right"))

    def threshold_for(self, share: float) -> float:
        """Returns the smallest offset that at most the share `share` of the nonces exceeds."""
        return float(self.offsets[len(self.offsets) - 1 - math.floor(share * len(self.offsets))])


@dataclass(frozen=True)
class Rule:
    """The parameters of a validation of n nonces (protocol.md, section 2, Validation)."""

    dist_threshold: float
    p_mismatch: float
    fraud_threshold: float
    n: int

    @property
    def least_frauds(self) -> int:
        """Returns the smallest number of mismatches with which the verdict is fraud."""
        return int(least_frauds(self.n, self.p_mismatch, self.fraud_threshold))


@dataclass(frozen=True)
class Shares:
    """The largest share of honest nonces and the smallest share of a cheat's nonces beyond a
    threshold, with the names of their comparisons.
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
    """The measured offsets of honest machines and of cheats. A cheat tampers with the share
    `tampered_share` of its nonces.

    A threshold must suit every pair of machines. Therefore the worst sample counts, not the mean of
    the samples.
    """

    honest: Sequence[Sample]
    tampered: Sequence[Sample]
    tampered_share: float = 1.0

    def shares(self, threshold: float, at_worst: bool = False) -> Shares:
        """Returns the shares of honest and of a cheat's nonces beyond the threshold.

        With `at_worst`, replaces each counted share by its confidence limit on the unfavourable
        side.
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
    """How often one kind of test, with n nonces, detects each cheat. `found`: these rates by the
    cheat's name.
    """

    test: str
    n: int
    risk: float  # highest rate of false alarms for an honest machine
    found: Mapping[str, float]


def powers(
    evidence: Evidence, thresholds: Sequence[float], n: int, risk: float, seed: int = 0
) -> list[Power]:
    """Simulates how often three kinds of tests with n nonces detect each cheat. The network uses
    only the first kind.

    Each nonce gets a score: whether its offset is over a threshold, the offset itself, or the
    offset's rank among all honest offsets (a rank-sum test). A test detects a cheat if the mean
    score exceeds a limit. The limit is chosen so that the most deviant honest machine exceeds it
    with the probability `risk`. Nonces are drawn from the samples, so rates below 1 / _DRAWS cannot
    be measured.
    """
    chance = np.random.default_rng(seed)
    known = np.sort(np.concatenate([sample.offsets for sample in evidence.honest]))
    scores: dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[Any]]] = {
        **{f"count over {one:g}": partial(np.less, one) for one in thresholds},
        "mean": lambda offsets: offsets,
        "ranks": lambda offsets: np.searchsorted(known, offsets),
    }

    def means(score: npt.NDArray[Any], of_honest: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the mean scores of _DRAWS simulated validations. `score`: a machine's scores;
        `of_honest`: scores for the nonces with which a cheat does not tamper.
        """
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
    """Returns the rule that needs the fewest nonces to keep false alarms below `fraud_threshold`
    and misses below `most_miss`. If `n` is given, returns the rule of n nonces with the fewest
    misses.

    Risks are computed from confidence limits. p_mismatch is the largest share of honest mismatches
    that the samples do not exclude, so that false alarms stay below fraud_threshold for every
    number of nonces. If no number keeps misses below `most_miss`, returns the rule with MOST_NONCES
    and the fewest misses.
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
    """Returns the rules that `recommend` tries, the one with the largest threshold first.

    Only honest offsets, rounded up, are tried as thresholds, because a threshold between two of
    them would detect no more.
    """
    rules: dict[float, Rule] = {}
    for share in _TRIED_SHARES:
        threshold = _rounded_up(max(sample.threshold_for(share) for sample in evidence.honest), 3)
        p_mismatch = _rounded_up(evidence.shares(threshold, at_worst=True).honest, 2)
        if p_mismatch < 1:
            rules.setdefault(threshold, Rule(threshold, p_mismatch, fraud_threshold, MOST_NONCES))
    return list(rules.values())


def _nonces_needed(evidence: Evidence, rule: Rule, most_miss: float) -> int | None:
    """Returns the fewest nonces with which at most the share `most_miss` of cheats is missed,
    computed from confidence limits. Returns None if even MOST_NONCES do not suffice.
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
    """Rounds a positive number up to `digits` significant digits. Returns 0 for other numbers."""
    if number <= 0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(number))
    return float(round(math.ceil(round(number * 10.0**places, 6)) / 10.0**places, max(places, 0)))
