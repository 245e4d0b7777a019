"""A node passes the network's acceptance script (its validate.py), call by call: model on disk,
deployed, measured, and known vectors validated, over two engines.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.harness.waiting import wait_until
from tests.integration.node import run_node, tampered
from tests.peers.hub import REPO, Hub
from tests.stacks.round_client import FAST

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("acceptance")]

# Its reference file's fields, but for the vectors.
REFERENCE = {
    "block_hash": "TEST_BLOCK",
    "block_height": 100,
    "public_key": "test_pub_keys",
    "node_id": 0,
    "node_count": 1,
    "params": {"model": REPO, "seq_len": 64, "k_dim": 12},
}
STAT_TEST = {"dist_threshold": 0.2, "p_mismatch": 0.001, "fraud_threshold": 0.01}
WORDS = ["--max-model-len", "512", "--trust-remote-code", "--max-num-seqs=128"]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """What the script speaks to: a node that was told no model, with an empty cache."""
    with Hub() as hub, ExitStack() as exits:
        home = tmp_path_factory.mktemp("hf")
        env = {**FAST, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
        node = run_node(
            exits, model="", workers=2, deployed_workers=2, synthetic_step_ms=20.0, env=env
        )
        yield node.http


def post(script: httpx.Client, path: str, body: dict[str, Any], *expected: int) -> dict[str, Any]:
    answer = script.post(f"/api/v1{path}", json=body)
    assert answer.status_code in (expected or (200,)), answer.text
    found: dict[str, Any] = answer.json()
    return found


def get(script: httpx.Client, path: str) -> dict[str, Any]:
    answer = script.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_networks_acceptance_script_passes(script: httpx.Client) -> None:
    # The model comes onto the disk.
    wanted = {"hf_repo": REPO, "hf_commit": None}
    assert post(script, "/models/status", wanted)["status"] == "NOT_FOUND"
    assert post(script, "/models/download", wanted, 200, 202)["status"] != "NOT_FOUND"
    wait_until(
        lambda: post(script, "/models/status", wanted)["status"] == "DOWNLOADED", "the model", 60
    )

    # It is deployed, without waiting.
    found = get(script, "/inference/up/status")
    assert (found["is_running"], found["is_starting"]) == (False, False)
    body = {"model": REPO, "dtype": "auto", "additional_args": WORDS}
    post(script, "/inference/up/async", body)
    post(script, "/inference/up/async", body, 409)

    def is_running() -> bool:
        found = get(script, "/inference/up/status")
        assert found["status"] not in ("failed", "cancelled"), found
        return bool(found["is_running"])

    wait_until(is_running, "the model served", 300)
    wait_until(
        lambda: get(script, "/inference/up/status")["workers_running"] == 2, "both engines", 60
    )

    # It computes without a url, and both engines tell how fast.
    post(script, "/inference/pow/init/generate", REFERENCE)

    def rates() -> list[float]:
        backends = get(script, "/inference/pow/status")["backends"]
        return [
            float(one["stats"]["nonces_per_second"])
            for one in backends
            if int(one["stats"]["total_processed"]) > 0
        ]

    wait_until(lambda: len([rate for rate in rates() if rate > 0]) == 2, "both at work", 300)
    post(script, "/inference/pow/stop", {})

    # Vectors of the same node, asked for beforehand, are validated.
    nonces = list(range(32))
    artifacts = post(
        script, "/inference/pow/generate", {**REFERENCE, "nonces": nonces, "wait": True}
    )["artifacts"]
    honest = validate(script, artifacts)
    assert (honest["n_total"], honest["n_mismatch"], honest["mismatch_nonces"]) == (32, 0, [])
    assert (honest["p_value"], honest["fraud_detected"]) == (1.0, False)
    copy, changed = tampered(artifacts, every=4)
    cheated = validate(script, copy)
    assert (cheated["n_mismatch"], cheated["mismatch_nonces"]) == (len(changed), changed)
    assert (cheated["p_value"] < STAT_TEST["fraud_threshold"], cheated["fraud_detected"]) == (
        True,
        True,
    )


def validate(script: httpx.Client, artifacts: list[dict[str, Any]]) -> dict[str, Any]:
    nonces = [artifact["nonce"] for artifact in artifacts]
    asked = {**REFERENCE, "nonces": nonces, "wait": True, "validation": {"artifacts": artifacts}}
    return post(script, "/inference/pow/generate", asked | {"stat_test": STAT_TEST})
