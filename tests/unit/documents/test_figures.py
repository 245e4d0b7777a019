"""Figures in the documents that can be computed again come out the same."""

import re

import numpy as np
import pytest

from poc_core.arithmetic.statistics import binomial_p_value
from poc_core.schemes.artifact.terms import network_terms
from scripts.draw_distances import MODELS, distances
from tests.harness.documents import ROOT

PROOFS = (ROOT / "docs" / "proofs.md").read_text()
TERMS = network_terms("")


def row(begin: str) -> list[str]:
    """The cells of the table's row that begins so, without its first."""
    line = next(line for line in PROOFS.splitlines() if line.startswith(f"| {begin}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def fewest_that_are_a_fraud(n_total: int) -> int:
    return next(
        n
        for n in range(n_total + 1)
        if binomial_p_value(n, n_total, TERMS.p_mismatch) < TERMS.fraud_threshold
    )


def test_how_many_mismatches_are_a_fraud() -> None:
    for vectors, fewest in zip(row("vectors"), row("mismatches"), strict=True):
        assert fewest_that_are_a_fraud(int(vectors.replace(",", ""))) == int(fewest)


def test_the_networks_thresholds_are_those_of_the_code() -> None:
    for model in ("MiniMaxAI/MiniMax-M2.7", "zai-org/GLM-5.3-Flash", "any other"):
        assert float(row(model)[0]) == network_terms(model).dist_threshold


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[list[float], list[float]]]:
    """By model: of the same nonces, of different ones."""
    return {model: distances(model) for model in MODELS}


def test_how_far_different_nonces_lie_apart(
    measured: dict[str, tuple[list[float], list[float]]],
) -> None:
    others = np.concatenate([other for _, other in measured.values()])
    said = re.search(
        r"are (\S+) apart on average.* of the (\S+) pairs .* none is closer than (\S+)\.", PROOFS
    )
    assert said
    assert round(float(others.mean()), 1) == float(said[1])
    assert len(others) == int(said[2].replace(",", ""))
    assert others.min() > float(said[3])


def test_how_far_the_same_nonces_lie_apart(
    measured: dict[str, tuple[list[float], list[float]]],
) -> None:
    said = re.search(r"differ by (\S+) to (\S+) on average and by (\S+) at most", PROOFS)
    assert said
    for model in ("tiny-qwen3", "tiny-llama"):
        same, _ = measured[model]
        assert float(said[1]) - 0.0005 < np.mean(same) < float(said[2]) + 0.0005
        assert max(same) < float(said[3]) + 0.0005
