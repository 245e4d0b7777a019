"""Decode proofs through the whole stack as its users have it: `up` with a real vLLM engine,
commands, the API, a round beside chat.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.chains import assert_chains, golden, nonces_of
from tests.harness.chat_client import ask_all, prompts, vllm_args
from tests.harness.marks import needs_vllm
from tests.integration.node import PREFIX
from tests.peers.receiver import Receiver, gaps_and_repeats
from tests.stacks.round_client import FAST, RoundClient
from tests.stacks.up import Up, proofline

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    needs_vllm,
]

MODEL = "tiny-qwen3-moe-256"
EXIT_FRAUD = 3


@pytest.fixture(scope="module")
def node() -> Iterator[RoundClient]:
    up = Up("--model", MODEL, "--dtype", "float32", "--port", "0", "--", *vllm_args(), env=FAST)
    try:
        with httpx.Client(base_url=up.base_url, timeout=300, trust_env=False) as http:
            yield RoundClient(http, up.log, MODEL)
    finally:
        up.end()


@pytest.fixture(scope="module")
def case() -> dict[str, Any]:
    return golden(MODEL, "decode")[0]


@pytest.fixture(scope="module")
def chains(
    node: RoundClient, case: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The file that `proofline generate` wrote for the golden case."""
    path = tmp_path_factory.mktemp("chains") / "chains.json"
    nonces = ",".join(map(str, nonces_of(case)))
    done = proofline(
        "generate",
        "--block-hash",
        case["block_hash"],
        "--public-key",
        case["public_key"],
        "--nonces",
        nonces,
        "--seq-len",
        case["seq_len"],
        "--max-tokens",
        case["max_tokens"],
        "--url",
        node.base_url,
        "-o",
        path,
    )
    assert done.returncode == 0
    return path


def request(case: dict[str, Any], nonces: list[int], **more: Any) -> dict[str, Any]:
    params = {
        "model": MODEL,
        "seq_len": case["seq_len"],
        "decode": True,
        "max_tokens": case["max_tokens"],
    }
    about = {"block_hash": case["block_hash"], "public_key": case["public_key"], "block_height": 1}
    return (
        about
        | {"node_id": 0, "node_count": 1, "nonces": nonces, "params": params, "wait": True}
        | more
    )


def document(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_generate_gives_the_references_chains(chains: Path, case: dict[str, Any]) -> None:
    found = json.loads(chains.read_text())["artifacts"]
    assert [one["nonce"] for one in found] == nonces_of(case)
    assert_chains([one["k_points_steps"] for one in found], case)


def test_validate_finds_its_own_chains_honest_and_a_changed_one_forged(
    node: RoundClient, chains: Path, tmp_path: Path
) -> None:
    done = proofline("validate", "--artifacts", chains, "--url", node.base_url)
    assert done.returncode == 0
    assert {one["mismatch_margin_max"] < 1e-4 for one in json.loads(done.stdout)["per_nonce"]} == {
        True
    }
    forged = json.loads(chains.read_text())
    for one in forged["artifacts"]:
        one["k_points_steps"][5] = (one["k_points_steps"][5] + 8) % 16
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    done = proofline("validate", "--artifacts", tmp_path / "forged.json", "--url", node.base_url)
    assert (done.returncode, json.loads(done.stdout)["fraud_detected"]) == (EXIT_FRAUD, True)


def test_the_api_computes_and_judges_in_each_form_of_a_request(
    node: RoundClient, case: dict[str, Any]
) -> None:
    nonces = [*range(3, 40)]
    computed = document(node.http.post(f"{PREFIX}/generate", json=request(case, nonces)))[
        "artifacts"
    ]
    assert {len(one["k_points_steps"]) for one in computed} == {case["max_tokens"] + 1}
    by_scheme = request(case, nonces)
    by_scheme["params"] |= {"scheme": "decode"}
    del by_scheme["params"]["decode"]
    enforced = {str(one["nonce"]): one["k_points_steps"] for one in computed}
    for asked in (request(case, nonces, enforced_k_steps=enforced), by_scheme):
        verdict = document(
            node.http.post(
                f"{PREFIX}/generate", json=asked | {"validation": {"artifacts": computed}}
            )
        )
        assert (verdict["n_total"], verdict["n_mismatch"], verdict["fraud_detected"]) == (
            37,
            0,
            False,
        )


def test_a_rounds_chains_reach_the_receiver_beside_chat_and_are_judged_by_callback(
    node: RoundClient, case: dict[str, Any]
) -> None:
    questions = prompts(3, seed=5)
    alone = ask_all(node.http, questions, 1, model=MODEL)
    with Receiver() as receiver:
        done = proofline(
            "round",
            "start",
            "--block-hash",
            case["block_hash"],
            "--public-key",
            case["public_key"],
            "--seq-len",
            case["seq_len"],
            "--max-tokens",
            case["max_tokens"],
            "--callback-url",
            receiver.url,
            "--url",
            node.base_url,
        )
        assert done.returncode == 0
        node.wait_progress(20)
        assert [one.tokens for one in ask_all(node.http, questions, 1, model=MODEL)] == [
            one.tokens for one in alone
        ]
        node.wait_progress(20)
        assert proofline("round", "stop", "--url", node.base_url).returncode == 0
        node.wait_delivered()
        assert gaps_and_repeats(receiver.nonces(), range(10_000))[1] == []
        sent = [one for payload in receiver.round_payloads() for one in payload.body["artifacts"]]
        assert {(one["vector_b64"], len(one["k_points_steps"])) for one in sent} == {
            ("", case["max_tokens"] + 1)
        }
        asked = request(case, [one["nonce"] for one in sent[:50]], wait=False, url=receiver.url)
        document(
            node.http.post(
                f"{PREFIX}/generate", json=asked | {"validation": {"artifacts": sent[:50]}}
            )
        )
        node.wait(lambda: bool(receiver.taken("/validated")), 300, "the verdict")
    (verdict,) = receiver.taken("/validated")
    assert (verdict.body["n_mismatch"], verdict.body["excluded_nonces"]) == (0, [])
    assert len(verdict.body["per_nonce"]) == min(50, len(sent))
