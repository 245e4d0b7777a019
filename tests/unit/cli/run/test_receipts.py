"""What a receiver makes of what it is sent."""

from typing import Any

import pytest

from cli.run.receipts import Receipts


def artifacts(*nonces: int, payload_id: str | None = "r-0", **more: Any) -> dict[str, Any]:
    body = {
        "block_hash": "b",
        "node_id": 0,
        "artifacts": [{"nonce": nonce, "vector_b64": "AA=="} for nonce in nonces],
    }
    return body | ({"payload_id": payload_id} if payload_id else {}) | more


def distances(*nonces: int, payload_id: str = "r-0") -> dict[str, Any]:
    return {
        "payload_id": payload_id,
        "nonces": list(nonces),
        "dist": [1.4] * len(nonces),
        "r_target": 1.405,
    }


@pytest.fixture
def receipts() -> Receipts:
    return Receipts()


def test_each_payload_is_a_line(receipts: Receipts) -> None:
    assert receipts.take("/generated", artifacts(0, 1, 2)).line == "/generated r-0 3 artifacts"
    found = receipts.take("/generated", distances(3, 7, payload_id="d-0"))
    assert found.line == "/generated d-0 2 valid nonces"
    verdict = {"request_id": "j", "payload_id": "j-0", "n_total": 200, "n_mismatch": 31}
    verdict |= {"fraud_detected": True}
    assert receipts.take("/validated", verdict).line == "/validated j-0 FRAUD, 31 of 200 wrong"
    assert receipts.is_whole()


def test_what_comes_once_and_in_order_is_whole(receipts: Receipts) -> None:
    receipts.take("/generated", artifacts(1, 4, payload_id="r-0"))
    receipts.take("/generated", artifacts(10, 7, payload_id="r-1"))
    assert receipts.is_whole()
    assert receipts.summary() == ["round r: 4 nonces in 2 payloads, none missing"]


def test_a_nonce_that_never_came_is_missing(receipts: Receipts) -> None:
    receipts.take("/generated", artifacts(*range(0, 100, 5), payload_id="r-0"))
    receipts.take("/generated", artifacts(*range(120, 200, 5), payload_id="r-1"))
    (told,) = receipts.summary()
    assert told == "round r: 36 nonces in 2 payloads; 4 nonces MISSING: 100, 105, 110, 115"
    assert not receipts.is_whole()


def test_a_nonce_far_beyond_the_others_does_not_delay_the_end(receipts: Receipts) -> None:
    receipts.take("/generated", artifacts(0, 1, 2**53))
    (told,) = receipts.summary()
    assert told.endswith("9,007,199,254,740,990 nonces MISSING: 2, 3, 4, 5, 6, ...")
    assert not receipts.is_whole()


def test_a_nonce_that_comes_in_two_payloads_is_a_fault(receipts: Receipts) -> None:
    receipts.take("/generated", artifacts(0, 1))
    found = receipts.take("/generated", artifacts(1, 2, payload_id="r-1"))
    assert found.faults == ["1 nonces came TWICE: 1"]
    assert not receipts.is_whole()


def test_a_payload_that_comes_again_is_no_fault_unless_it_changed(receipts: Receipts) -> None:
    receipts.take("/generated", artifacts(0, 1))
    again = receipts.take("/generated", artifacts(0, 1))
    assert (again.line, again.faults) == ("/generated r-0 2 artifacts, again", [])
    assert receipts.is_whole()
    (told,) = receipts.summary()
    assert told == "round r: 2 nonces in 1 payloads, of which 1 came again, none missing"
    found = receipts.take("/generated", artifacts(0, 5))
    assert found.faults == ["r-0 came again with OTHER CONTENTS"]
    assert not receipts.is_whole()


def test_a_payload_that_is_left_out_is_a_fault(receipts: Receipts) -> None:
    receipts.take("/generated", artifacts(0))
    found = receipts.take("/generated", artifacts(1, payload_id="r-2"))
    assert found.faults == ["r-2 came OUT OF ORDER: number 1 was to come"]


def test_rounds_and_jobs_are_told_apart(receipts: Receipts) -> None:
    receipts.take("/generated", artifacts(0, 1))
    receipts.take("/generated", artifacts(0, 1, payload_id="s-0"))
    receipts.take("/generated", artifacts(0, 9, payload_id="j-0", request_id="j"))
    assert receipts.is_whole()
    told = [line.partition(":")[0] for line in receipts.summary()]
    assert told == ["round r", "round s", "job j"]


def test_other_nodes_payloads_have_no_id(receipts: Receipts) -> None:
    receipts.take("/generated", artifacts(0, 1, payload_id=None))
    found = receipts.take("/generated", artifacts(1, 2, payload_id=None))
    assert found.faults == ["1 nonces came TWICE: 1"]
    assert receipts.summary() == ["block b of node 0: 3 nonces in 2 payloads, none missing"]


@pytest.mark.parametrize(
    "body",
    [
        {"artifacts": 5},
        {"artifacts": [{}]},
        {"nonces": ["1"]},
        {"nonces": 5},
        {"payload_id": 5},
        {"payload_id": ["r-0"]},
    ],
)
def test_what_is_no_payload_is_refused(receipts: Receipts, body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"its (nonces|artifacts|payload_id)"):
        receipts.take("/generated", body)


def test_a_fraud_is_told_with_what_it_rests_on(receipts: Receipts) -> None:
    verdict = {
        "request_id": "j",
        "n_total": 50,
        "n_mismatch": 50,
        "fraud_detected": True,
        "distances": {"min": 1.2, "median": 1.4, "max": 1.6},
        "dist_threshold": 0.02,
        "likely_cause": "Another key.",
    }
    why = "distances 1.2000 to 1.6000, median 1.4000, threshold 0.02; Another key."
    assert receipts.take("/validated", verdict).line.endswith(f"FRAUD, 50 of 50 wrong; {why}")
    odd = verdict | {"distances": {"min": "x"}, "likely_cause": None}
    assert receipts.take("/validated", odd).line.endswith("FRAUD, 50 of 50 wrong")
