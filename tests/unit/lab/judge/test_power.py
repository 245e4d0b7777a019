"""Rules, their exact risks, and a simulation that knows only the verdict itself."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from lab.judge.comparisons import Comparisons, compare
from lab.judge.power import MOST_NONCES, Evidence, Rule, Sample, powers, recommend
from lab.judge.proof_files import read_machines
from lab.judge.report_findings import find
from lab.judge.statistics import at_least, at_most, least_frauds
from poc_core.arithmetic.statistics import binomial_p_value

ROOT = Path(__file__).resolve().parents[4]
GOLDEN, MADE = ROOT / "tests/data/golden", ROOT / "tests/data/report"
DRAWS = 10_000


def sample(*offsets: float, name: str = "a, b") -> Sample:
    return Sample(name, np.sort(np.array(offsets, np.float64)))


def spread(mean: float, n: int = 1000) -> Sample:
    return Sample(f"mean {mean}", np.sort(np.random.default_rng(1).gamma(4, mean / 4, n)))


@pytest.mark.parametrize("p_wrong", [1e-4, 0.001, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("fraud_threshold", [1e-6, 0.01, 0.3])
def test_the_fewest_frauds_are_what_the_verdict_says(
    p_wrong: float, fraud_threshold: float
) -> None:
    counts = [1, 2, 7, 20, 100]
    expected = [
        next((k for k in range(n + 1) if binomial_p_value(k, n, p_wrong) < fraud_threshold), n + 1)
        for n in counts
    ]
    assert least_frauds(counts, p_wrong, fraud_threshold).tolist() == expected


def test_a_probability_as_good_as_the_threshold_is_no_fraud() -> None:
    assert binomial_p_value(2, 2, 0.5) == 0.25
    assert least_frauds([2], 0.5, 0.25).tolist() == [3]


@pytest.mark.parametrize(("n_found", "n"), [(0, 32), (3, 200), (199, 200)])
def test_a_limit_is_the_share_with_which_so_few_are_seen_once_in_twenty(
    n_found: int, n: int
) -> None:
    assert 1 - binomial_p_value(n_found + 1, n, at_most(n_found, n)) == pytest.approx(0.05)
    assert at_least(n - n_found, n) == pytest.approx(1 - at_most(n_found, n))


def test_limits_of_all_and_none() -> None:
    assert at_most(0, 32) == pytest.approx(1 - 0.05 ** (1 / 32))
    assert (at_most(32, 32), at_least(0, 32)) == (1.0, 0.0)


def test_the_worst_comparison_counts() -> None:
    evidence = Evidence(
        [sample(0.01, 0.02, name="near"), sample(0.01, 0.04, name="far")],
        [sample(0.03, 0.9, name="found"), sample(0.02, 0.03, name="hidden")],
    )
    shares = evidence.shares(0.02)
    assert (shares.honest, shares.honest_name) == (0.5, "far")
    assert (shares.cheat, shares.cheat_name) == (0.5, "hidden")
    assert evidence.shares(0.02, at_worst=True).honest == pytest.approx(at_most(1, 2))


def test_an_offset_at_the_threshold_does_not_mismatch() -> None:
    assert sample(0.01, 0.02, 0.03).n_beyond(0.02) == 1


def test_a_cheat_that_tampers_with_some_nonces_is_honest_in_the_others() -> None:
    evidence = Evidence([sample(0.01, 0.03)], [sample(0.9, 0.9)], tampered_share=0.2)
    assert evidence.shares(0.02).cheat == pytest.approx(0.2 + 0.8 * 0.5)


def test_the_threshold_lies_between_and_is_no_larger_than_honest_machines_need() -> None:
    honest, cheat = spread(0.01), spread(1.0)
    found = recommend(Evidence([honest], [cheat]), 0.01, 0.01)
    assert found.kept
    assert honest.offsets[-1] <= found.rule.dist_threshold < honest.offsets[-1] * 1.01
    assert found.rule.p_mismatch == pytest.approx(at_most(0, 1000), rel=0.1)
    assert found.rule.n <= 3


@pytest.mark.parametrize("tampered_share", [1.0, 0.3])
def test_both_risks_are_kept_at_worst_with_that_many_nonces_or_more(tampered_share: float) -> None:
    evidence = Evidence([spread(0.01)], [spread(0.02)], tampered_share)
    found = recommend(evidence, fraud_threshold=0.02, most_miss=0.005)
    assert found.kept
    for more in (0, 1, 2, 3, 10, 100):
        rule = Rule(found.rule.dist_threshold, found.rule.p_mismatch, 0.02, found.rule.n + more)
        risks = evidence.risks(rule, at_worst=True)
        assert risks.false_alarm < 0.02
        assert risks.miss <= 0.005
    fewer = Rule(found.rule.dist_threshold, found.rule.p_mismatch, 0.02, found.rule.n - 1)
    assert evidence.risks(fewer, at_worst=True).miss > 0.005


def test_of_a_given_number_of_nonces_the_rule_that_misses_least_is_recommended() -> None:
    evidence = Evidence([spread(0.01)], [spread(0.02)])
    found = recommend(evidence, 0.01, 0.01, n=10)
    assert (found.rule.n, found.kept) == (10, False)
    misses = []
    for threshold in np.linspace(0.005, 0.04, 50):
        p_mismatch = evidence.shares(threshold, at_worst=True).honest
        misses.append(evidence.risks(Rule(threshold, p_mismatch, 0.01, 10), at_worst=True).miss)
    assert evidence.risks(found.rule, at_worst=True).miss <= 1.1 * min(misses)


def test_what_cannot_be_told_apart_is_said_to_be_so() -> None:
    found = recommend(Evidence([spread(0.01)], [spread(0.01)]), 0.01, 0.01)
    assert (found.rule.n, found.kept) == (MOST_NONCES, False)


def comparisons(honest: list[Path], tampered: list[Path]) -> Comparisons:
    machines = read_machines([*honest, *tampered])
    return compare(machines[: len(honest)], machines[len(honest) :])


def golden(model: str) -> Comparisons:
    files = [
        f"{machine}-{model}-{dtype}.json"
        for machine, dtype in (("h200", "bfloat16"), ("cpu", "float32"))
    ]
    return comparisons([GOLDEN / file for file in files], [GOLDEN / "cpu-tiny-llama-float32.json"])


def made() -> Comparisons:
    honest = ["transformers-float32", "transformers-bfloat16", "vllm-bfloat16"]
    return comparisons(
        [MADE / f"{name}.json" for name in honest], [MADE / "int8.json", MADE / "int4.json"]
    )


def margins() -> Comparisons:
    """Verdicts on honest and on random chains, the reference's own; of its eight nonces each
    five times.
    """
    files = {"honest": "runner_up", "random": "all_random"}
    cases = json.loads((GOLDEN / "decode-cpu-tiny-qwen3-256-bfloat16.json").read_text())[
        "validation"
    ]
    offsets = {
        name: [
            one["mismatch_margin_max"]
            for case in cases
            if case["name"] == wanted
            for one in case["expect"]["per_nonce"]
        ]
        for name, wanted in files.items()
    }
    samples = {name: sample(*found * 5, name=name) for name, found in offsets.items()}
    return Comparisons(
        ["honest", "random"],
        [samples["honest"]],
        [samples["random"]],
        np.empty((0, 0)),
        unit="margin",
    )


class Simulation:
    """Validations of nonces that are drawn from a comparison, each judged as a node judges."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._random = np.random.default_rng(16)

    def frauds(self, honest: Sample, tampered: Sample, tampered_share: float) -> float:
        """The share of DRAWS validations that find a fraud."""
        size = (DRAWS, self._rule.n)
        drawn = np.where(
            self._random.random(size) < tampered_share,
            self._random.choice(tampered.offsets, size),
            self._random.choice(honest.offsets, size),
        )
        mismatches = (drawn > self._rule.dist_threshold).sum(axis=1)
        return float(np.mean([self._is_fraud(int(n)) for n in mismatches]))

    @cache  # noqa: B019 - of a few numbers, for one test
    def _is_fraud(self, n_mismatch: int) -> bool:
        return (
            binomial_p_value(n_mismatch, self._rule.n, self._rule.p_mismatch)
            < self._rule.fraud_threshold
        )


def agree(counted: float, simulated: float) -> bool:
    """Within 10 %, or within what 10,000 draws leave open where that is more (of risks below 8
    %).
    """
    return abs(simulated - counted) <= max(
        0.1 * counted, 3 * math.sqrt(counted * (1 - counted) / DRAWS)
    )


@pytest.mark.parametrize("tampered_share", [1.0, 0.25])
@pytest.mark.parametrize("sample_size", [None, 12])
@pytest.mark.parametrize(
    "compared",
    [
        golden("tiny-qwen3"),
        golden("tiny-qwen3-moe"),
        made(),
        pytest.param(margins(), marks=pytest.mark.slow),
    ],
    ids=["golden, dense", "golden, experts", "int8", "margins"],
)
def test_a_simulation_of_10_000_draws_agrees(
    compared: Comparisons, sample_size: int | None, tampered_share: float
) -> None:
    findings = find(compared, tampered_share, 0.01, 0.01, sample_size)
    honest = {one.name: one for one in compared.honest}
    tampered = {one.name: one for one in compared.tampered}
    for judged in (findings.recommended, findings.usual):
        rule, shares = judged.rule, findings.evidence.shares(judged.rule.dist_threshold)
        worst, cheat = honest[shares.honest_name], tampered[shares.cheat_name]
        least = min(
            compared.honest, key=lambda one: one.n_beyond(rule.dist_threshold) / len(one.offsets)
        )
        simulation = Simulation(rule)
        assert agree(judged.counted.false_alarm, simulation.frauds(worst, worst, 0.0))
        assert agree(judged.counted.miss, 1 - simulation.frauds(least, cheat, tampered_share))
        assert judged.at_worst.false_alarm >= judged.counted.false_alarm
        assert judged.at_worst.miss >= judged.counted.miss
    # The threshold beyond which the told share of 10,000 honest nonces lies.
    threshold, shares = (
        findings.recommended.rule.dist_threshold,
        findings.evidence.shares(findings.recommended.rule.dist_threshold),
    )
    drawn = np.random.default_rng(17).choice(honest[shares.honest_name].offsets, DRAWS)
    assert np.quantile(drawn, 1 - shares.honest) == pytest.approx(threshold, rel=0.1)


def test_a_mean_and_ranks_find_what_a_count_over_a_high_threshold_cannot() -> None:
    """As of int8 weights: a little further everywhere, and nowhere over the network's 0.4."""
    evidence = Evidence([spread(0.06)], [spread(0.1), spread(0.06)])
    count, mean, ranks = powers(evidence, [0.4], n=50, risk=0.01)
    assert [one.test for one in (count, mean, ranks)] == ["count over 0.4", "mean", "ranks"]
    assert count.found["mean 0.1"] < 0.1
    assert min(mean.found["mean 0.1"], ranks.found["mean 0.1"]) > 0.95
    for one in (count, mean, ranks):  # a cheat that is as good as honest: false alarms alone
        assert one.found["mean 0.06"] <= 0.03


def test_tests_keep_the_risk_for_the_honest_machine_that_disagrees_most() -> None:
    near, far = spread(0.03), spread(0.06)
    cheat = Sample("far too", far.offsets)
    for one in powers(Evidence([near, far], [cheat]), [0.08], n=100, risk=0.01):
        assert one.found["far too"] <= 0.03


def test_a_cheat_that_tampers_with_few_nonces_is_found_less_often() -> None:
    honest, cheat = spread(0.06), spread(0.12)
    (whole,), (part,) = (
        [
            one.found["mean 0.12"]
            for one in powers(Evidence([honest], [cheat], share), [], n=50, risk=0.01)
            if one.test == "mean"
        ]
        for share in (1.0, 0.1)
    )
    assert part < whole / 2
