from typing import Any

import numpy as np
import pytest

from poc_core.schemes.artifact import causes
from poc_core.schemes.artifact.encoding import encode_vectors
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.artifact.verdict import compare

K_DIM = 4


def vector(*numbers: float) -> str:
    return encode_vectors(np.array([numbers], dtype=np.float32))[0]


OWN = {nonce: vector(0.5, -0.5, 0.5, -0.5) for nonce in range(100)}
FAR = vector(0.5, -0.5, 0.5, 0.5)


def test_equal_artifacts_are_honest() -> None:
    verdict = compare(OWN, OWN, K_DIM)
    assert (verdict.n_total, verdict.n_mismatch, verdict.mismatch_nonces) == (100, 0, [])
    assert (verdict.p_value, verdict.fraud_detected, verdict.n_excluded) == (1.0, False, 0)


def test_one_mismatch_in_a_hundred_is_no_fraud_but_two_are() -> None:
    one = compare(OWN, {**OWN, 7: FAR}, K_DIM)
    two = compare(OWN, {**OWN, 7: FAR, 3: FAR}, K_DIM)
    assert (one.mismatch_nonces, one.fraud_detected) == ([7], False)
    assert one.p_value == pytest.approx(0.09520785, rel=1e-6)
    assert (two.mismatch_nonces, two.fraud_detected) == ([3, 7], True)


@pytest.mark.parametrize(
    "bad", ["", "no base64", vector(0.5, -0.5, 0.5), vector(0.5, -0.5, 0.5, float("nan"))], ids=repr
)
def test_a_vector_that_cannot_be_read_is_a_mismatch(bad: Any) -> None:
    assert compare({1: OWN[1]}, {1: bad}, K_DIM).mismatch_nonces == [1]


def test_a_missing_vector_is_a_mismatch() -> None:
    assert compare({1: OWN[1], 2: OWN[2]}, {1: OWN[1]}, K_DIM).mismatch_nonces == [2]


def test_the_threshold_itself_still_agrees() -> None:
    # Both numbers and their distance of 0.25 are exact in float16.
    own, other = {1: vector(0.5, 0, 0, 0)}, {1: vector(0.75, 0, 0, 0)}
    assert compare(own, other, K_DIM, StatTest(dist_threshold=0.25)).n_mismatch == 0
    assert compare(own, other, K_DIM, StatTest(dist_threshold=0.2499)).n_mismatch == 1


def test_the_default_threshold_lies_at_0_02() -> None:
    own = {1: vector(0, 0, 0, 0)}
    assert compare(own, {1: vector(0.0199, 0, 0, 0)}, K_DIM).n_mismatch == 0
    assert compare(own, {1: vector(0.0201, 0, 0, 0)}, K_DIM).n_mismatch == 1


def test_excluded_nonces_are_not_compared() -> None:
    verdict = compare({1: None, 2: OWN[2], 3: None}, {1: FAR, 2: OWN[2], 3: "?"}, K_DIM)
    assert (verdict.n_total, verdict.n_mismatch, verdict.n_excluded) == (1, 0, 2)


@pytest.mark.parametrize("computed", [{}, {1: None}])
def test_nothing_compared_is_no_fraud_at_any_threshold(computed: Any) -> None:
    verdict = compare(computed, {1: FAR}, K_DIM, StatTest.model_construct(fraud_threshold=2.0))
    assert (verdict.n_total, verdict.p_value, verdict.fraud_detected) == (0, 1.0, False)


def test_fraud_only_below_the_fraud_threshold() -> None:
    received = {**OWN, 7: FAR}
    p_value = compare(OWN, received, K_DIM).p_value
    assert not compare(OWN, received, K_DIM, StatTest(fraud_threshold=p_value)).fraud_detected
    assert compare(OWN, received, K_DIM, StatTest(fraud_threshold=p_value * 1.001)).fraud_detected


def test_a_verdict_tells_the_distances_it_rests_on() -> None:
    verdict = compare(OWN, {**OWN, 7: FAR, 8: ""}, K_DIM)
    found = verdict.distances
    assert found is not None
    assert (found.min, found.median, found.max, verdict.dist_threshold) == (0.0, 0.0, 1.0, 0.02)
    assert (found.histogram[0], found.histogram[-1]) == ((1e-4, len(OWN) - 2), (1.0, 1))
    assert sum(n for _, n in found.histogram) == len(OWN) - 1
    assert compare({1: OWN[1]}, {1: ""}, K_DIM).distances is None
    beyond = compare(OWN, {**OWN, 7: vector(-3.0, 3.0, -3.0, 3.0)}, K_DIM).distances
    assert beyond is not None
    assert beyond.histogram[-1] == (2.0, 1)


def test_each_distance_is_counted_below_the_next_of_the_limits() -> None:
    limits = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    computed = {nonce: vector(0.0, 1.0) for nonce in range(len(limits))}
    received = {nonce: vector(0.9 * limit, 1.0) for nonce, limit in enumerate(limits)}
    found = compare(computed, received, 2).distances
    assert found is not None
    assert found.histogram == [(limit, 1) for limit in limits]


NEAR = vector(0.5, -0.5, 0.5, -0.45)
# On both sides of half of sqrt(2), which is how far apart unrelated unit vectors are.
UNDER, OVER = vector(0.5, -0.5, 0.5, 0.2), vector(0.5, -0.5, 0.5, 0.22)


@pytest.mark.parametrize(
    ("received", "cause"),
    [
        (dict.fromkeys(OWN, FAR), causes.OTHER_INPUTS),
        ({**OWN, 3: FAR, 7: FAR}, causes.SOME_MADE_UP),
        (OWN | dict.fromkeys(range(89), FAR), causes.SOME_MADE_UP),
        (OWN | dict.fromkeys(range(90), FAR), causes.OTHER_INPUTS),
        (dict.fromkeys(OWN, NEAR), causes.LITTLE_APART),
        ({**OWN, 3: NEAR, 7: NEAR}, causes.LITTLE_APART),
        (dict.fromkeys(OWN, UNDER), causes.LITTLE_APART),
        (dict.fromkeys(OWN, OVER), causes.OTHER_INPUTS),
        (dict.fromkeys(OWN, "no base64"), causes.UNREADABLE),
        ({}, causes.UNREADABLE),
        ({**OWN, 3: FAR}, None),
        (OWN, None),
    ],
    ids=[
        "other",
        "some",
        "89 of 100",
        "90",
        "little",
        "few little",
        "under half",
        "over half",
        "unreadable",
        "missing",
        "no fraud",
        "honest",
    ],
)
def test_the_pattern_of_a_fraud_speaks_for_a_cause(
    received: dict[int, str], cause: str | None
) -> None:
    assert compare(OWN, received, K_DIM).likely_cause == cause
