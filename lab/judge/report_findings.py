"""What `report` finds: a recommended rule with its risks, and the risks of the network's default
rule.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.judge.comparisons import Comparisons
from lab.judge.power import Evidence, Power, Risks, Rule, Sample, powers, recommend
from lab.judge.statistics import CONFIDENCE
from poc_core.schemes.artifact import terms
from poc_core.schemes.decode.requests import MARGIN

ReportTable = tuple[str, Sequence[str], list[list[str]]]  # heading, column names, rows


@dataclass(frozen=True)
class JudgedRule:
    """A rule with its risks, computed from the counted shares and, `at_worst`, from their
    confidence limits.
    """

    label: str
    rule: Rule
    counted: Risks
    at_worst: Risks


@dataclass(frozen=True)
class Findings:
    comparisons: Comparisons
    evidence: Evidence
    recommended: JudgedRule
    usual: JudgedRule  # the network's default rule, with as many nonces
    kept: bool
    most_miss: float
    sample_size: int | None  # as requested
    powers: Sequence[Power]  # of tests other than the network's, with as many nonces or 200

    def sentences(self) -> list[str]:
        """Returns sentences for the user about the recommended settings and their risks."""
        judged, rule = self.recommended, self.recommended.rule
        shares = self.evidence.shares(rule.dist_threshold)
        more = " or more" if self.sample_size is None and self.kept else ""
        told = [
            (
                f"Set dist_threshold {rule.dist_threshold:g}, p_mismatch {rule.p_mismatch:g},"
                f" fraud_threshold {rule.fraud_threshold:g} and check {rule.n:,} nonces{more}. With"
                f" {rule.n:,} nonces, {rule.least_frauds:,} mismatches or more are a fraud."
            ),
            (
                f"An honest machine is called a fraud in {percent(judged.counted.false_alarm)} of"
                f" validations, at worst in {percent(judged.at_worst.false_alarm)}. A cheat that"
                f" tampers with {percent(self.evidence.tampered_share)} of its nonces is missed in"
                f" {percent(judged.counted.miss)} of validations, at worst in"
                f" {percent(judged.at_worst.miss)}."
            ),
            (
                f"{percent(shares.honest)} of honest nonces exceed the threshold"
                f" ({shares.honest_name}), and {percent(shares.cheat)} of a cheat's"
                f' ({shares.cheat_name}). "At worst" is the limit of the'
                f" {percent(CONFIDENCE)} confidence interval for so few nonces."
            ),
        ]
        if not self.kept:
            told.append(
                f"The rule does not keep misses below {percent(self.most_miss)}: honest and"
                " tampered nonces lie too close together, or too few are known. Compute or check"
                " more nonces."
            )
        return told + self.comparisons.notes

    def rows(self) -> list[tuple[str, Sample, bool]]:
        """Returns one row per comparison: "honest" or "tampered", the sample, and True if both
        machines are honest.
        """
        honest = [("honest", sample, True) for sample in self.comparisons.honest]
        return honest + [("tampered", sample, False) for sample in self.comparisons.tampered]

    def rates(self) -> list[tuple[str, str, list[float]]]:
        """Returns one row per sample of margins: its name, "honest" or "tampered", and the share of
        nonces beyond each of RATE_THRESHOLDS.

        Returns no rows if artifacts were compared.
        """
        if self.comparisons.unit != "margin":
            return []
        return [
            (
                sample.name,
                kind,
                [sample.n_beyond(limit) / len(sample.offsets) for limit in RATE_THRESHOLDS],
            )
            for kind, sample, _ in self.rows()
        ]

    def tables(self) -> list[ReportTable]:
        """Returns the report's tables, the most important first, without empty ones."""
        threshold = self.recommended.rule.dist_threshold
        compared = [comparison_cells(kind, sample, threshold) for kind, sample, _ in self.rows()]
        rates = [rate_cells(*row) for row in self.rates()]
        rules = [rule_cells(judged) for judged in (self.recommended, self.usual)]
        found = [
            ("Rules and their risks", RULE_COLUMNS, rules),
            (f"Comparisons ({self.comparisons.unit})", COMPARISON_COLUMNS, compared),
            self.tests(),
            ("Mismatches by dist_threshold", RATE_COLUMNS, rates),
        ]
        return [table for table in found if table[2]]

    def tests(self) -> ReportTable:
        """Returns a table that shows how often each kind of test detects each cheat."""
        first = self.powers[0]
        title = f"Cheats found by {first.n:,} nonces, at {percent(first.risk)} false alarms"
        rows = [[name, *(percent(one.found[name]) for one in self.powers)] for name in first.found]
        return title, ["machines", *(one.test for one in self.powers)], rows

    def document(self) -> dict[str, Any]:
        """Returns all findings as a JSON document. Shares and risks are from 0 to 1."""
        threshold = self.recommended.rule.dist_threshold
        return {
            "unit": self.comparisons.unit,
            "comparisons": [
                {
                    "name": sample.name,
                    "honest": honest,
                    "n": len(sample.offsets),
                    "mean": float(sample.offsets.mean()),
                    "largest": float(sample.offsets[-1]),
                    "share_beyond": sample.n_beyond(threshold) / len(sample.offsets),
                }
                for _, sample, honest in self.rows()
            ],
            "mismatch_rates": [
                {"name": name, "kind": kind, **dict(zip(RATE_NAMES, shares, strict=True))}
                for name, kind, shares in self.rates()
            ],
            "tampered_share": self.evidence.tampered_share,
            "recommended": _judged(self.recommended) | {"kept": self.kept},
            "usual": _judged(self.usual),
            "tests": [asdict(one) for one in self.powers],
            "notes": self.comparisons.notes,
        }


def find(
    comparisons: Comparisons,
    tampered_share: float,
    fraud_threshold: float,
    most_miss: float,
    sample_size: int | None,
) -> Findings:
    evidence = Evidence(comparisons.honest, comparisons.tampered, tampered_share)
    found = recommend(evidence, fraud_threshold, most_miss, sample_size)
    network = terms.network_terms("")
    threshold = network.dist_threshold if comparisons.unit == "L2 distance" else MARGIN
    usual = Rule(threshold, network.p_mismatch, network.fraud_threshold, found.rule.n)
    tried = sorted({found.rule.dist_threshold, threshold})
    n = sample_size or min(found.rule.n, NETWORKS_SAMPLE)
    return Findings(
        comparisons,
        evidence,
        _judge("recommended", found.rule, evidence),
        _judge("the network's", usual, evidence),
        found.kept,
        most_miss,
        sample_size,
        powers(evidence, tried, n, fraud_threshold),
    )


def percent(share: float) -> str:
    """Formats a share (0 to 1) in percent, with two or three significant digits."""
    if 0 < share < 1e-6:
        return "less than 0.0001 %"
    return f"{100 * share:.3g} %" if share > 0.1 else f"{100 * share:.2g} %"


def _judge(label: str, rule: Rule, evidence: Evidence) -> JudgedRule:
    return JudgedRule(label, rule, evidence.risks(rule), evidence.risks(rule, at_worst=True))


def _judged(judged: JudgedRule) -> dict[str, Any]:
    at_worst = {f"{name}_at_worst": risk for name, risk in asdict(judged.at_worst).items()}
    rule = asdict(judged.rule) | {"least_frauds": judged.rule.least_frauds}
    return rule | asdict(judged.counted) | at_worst


# Nonces that the network's validators check.
NETWORKS_SAMPLE = 200
RULE_COLUMNS: Sequence[str] = (
    "rule",
    "dist_threshold",
    "p_mismatch",
    "fraud_threshold",
    "nonces",
    "a fraud from",
    "false alarm",
    "at worst",
    "miss",
    "at worst",
)
# Thresholds that the network's authors name for its models' chains (docs/decode.md).
RATE_THRESHOLDS = (0.025, 0.03, 0.04, 0.05)
RATE_NAMES = [f"{threshold:g}" for threshold in RATE_THRESHOLDS]
RATE_COLUMNS: Sequence[str] = ("judged chains", "", *RATE_NAMES)
COMPARISON_COLUMNS: Sequence[str] = (
    "machines",
    "",
    "nonces",
    "mean",
    "largest",
    "beyond the threshold",
)


def rule_cells(judged: JudgedRule) -> list[str]:
    rule = judged.rule
    risks = [
        judged.counted.false_alarm,
        judged.at_worst.false_alarm,
        judged.counted.miss,
        judged.at_worst.miss,
    ]
    numbers = [f"{rule.dist_threshold:g}", f"{rule.p_mismatch:g}", f"{rule.fraud_threshold:g}"]
    return [judged.label, *numbers, f"{rule.n:,}", f"{rule.least_frauds:,}", *map(percent, risks)]


def rate_cells(name: str, kind: str, shares: Sequence[float]) -> list[str]:
    return [name, kind, *map(percent, shares)]


def comparison_cells(kind: str, sample: Sample, threshold: float) -> list[str]:
    offsets = sample.offsets
    share = sample.n_beyond(threshold) / len(offsets)
    return [
        sample.name,
        kind,
        f"{len(offsets):,}",
        f"{offsets.mean():.4f}",
        f"{offsets[-1]:.4f}",
        percent(share),
    ]
