"""Decode proofs: plain transformers against the reference's chains, and through the whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from poc_core.records import ProofSpec
from poc_core.schemes.decode.contract import CONTRACT
from tests.harness.chains import (
    assert_chains,
    assert_judged,
    enforced_spec,
    golden,
    nonces_of,
    spec_of,
    stepwise,
)
from tests.harness.golden import model_dir
from tests.harness.waiting import wait_until
from tests.integration.node import PREFIX, Node, run_node
from tests.peers.receiver import Receiver
from workers.engines.options import EngineOptions
from workers.pipeline import compute_all

if TYPE_CHECKING:  # every process of `make test` imports this module, one needs transformers for it
    from workers.engines.transformers import TransformersEngine

# One process loads transformers.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("transformers")]

MODELS = ["tiny-qwen3-256", "tiny-qwen3-moe-256"]


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Iterator[TransformersEngine]:
    from workers.engines.transformers import TransformersEngine

    engine = TransformersEngine(
        EngineOptions(model=model_dir(request.param), engine="transformers", dtype="float32")
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("index", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_chains_are_the_references(engine: TransformersEngine, index: int) -> None:
    case = golden(engine.info.name, "decode")[index]
    assert_chains(compute_all(engine, spec_of(case), nonces_of(case)), case)


def test_a_chain_does_not_depend_on_its_batch(engine: TransformersEngine) -> None:
    case = golden(engine.info.name, "decode")[0]
    nonces = nonces_of(case)[::-1][:3]
    expected = {one["nonce"]: one["k_points_steps"] for one in case["artifacts"]}
    assert compute_all(engine, spec_of(case), nonces) == [expected[nonce] for nonce in nonces]


def test_reflections_of_each_nonces_own_change_the_chains(engine: TransformersEngine) -> None:
    case = golden(engine.info.name, "decode")[0]
    own: list[Any] = compute_all(
        engine, spec_of(case, per_nonce_reflection=True), nonces_of(case)[:2]
    )
    shared: list[Any] = compute_all(engine, spec_of(case), nonces_of(case)[:2])
    assert all(one != other for one, other in zip(own, shared, strict=True))


@pytest.mark.parametrize("index", range(7))
def test_claims_lie_as_far_off_as_the_reference_finds(
    engine: TransformersEngine, index: int
) -> None:
    case = golden(engine.info.name, "validation")[index]
    assert_judged(compute_all(engine, enforced_spec(case), nonces_of(case)), case)


def test_one_forward_judges_as_step_by_step(engine: TransformersEngine) -> None:
    """Random claims: at every step other inputs than one's own."""
    case = next(
        case for case in golden(engine.info.name, "validation") if case["name"] == "all_random"
    )
    spec, nonces = enforced_spec(case), nonces_of(case)
    at_once, in_steps = (compute_all(engine, one, nonces) for one in (spec, stepwise(spec)))
    assert [value[0] for value in at_once] == [value[0] for value in in_steps]
    assert [value[1] for value in at_once] == pytest.approx(
        [value[1] for value in in_steps], abs=1e-5
    )


def test_a_chain_of_another_length_is_a_mismatch(engine: TransformersEngine) -> None:
    case = golden(engine.info.name, "decode")[0]
    nonce, chain = case["artifacts"][0]["nonce"], case["artifacts"][0]["k_points_steps"]
    for claimed in (chain[:1], [*chain, 0]):
        (value,) = compute_all(engine, spec_of(case, enforced={str(nonce): claimed}), [nonce])
        assert value == [len(chain), 2.0]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with ExitStack() as exits, pytest.MonkeyPatch.context() as patch:
        patch.setenv("POC_CALLBACK_INTERVAL_SEC", "0.2")
        yield run_node(exits, model="tiny-qwen3-256", workers=1, synthetic_step_ms=10.0)


def ask(node: Node, n: int, **changes: Any) -> Any:
    common = {
        "block_hash": "b",
        "block_height": 7,
        "public_key": "k",
        "node_id": 0,
        "node_count": 1,
        "wait": True,
    }
    params = {"model": "tiny-qwen3-256", "seq_len": 32, "decode": True, "max_tokens": 8}
    return node.http.post(
        f"{PREFIX}/generate", json=common | {"nonces": list(range(n)), "params": params} | changes
    )


def test_a_job_and_its_validation_through_the_stack(node: Node) -> None:
    answer = ask(node, 40)
    assert answer.status_code == 200, answer.text
    artifacts = answer.json()["artifacts"]
    spec = ProofSpec(
        scheme="decode", block_hash="b", public_key="k", seq_len=32,
        options={"max_tokens": 8, "per_nonce_reflection": False, "k_dim": 12, "enforced": None},
    )  # fmt: skip
    chains = CONTRACT.synthetic_values(spec, range(40), 256)
    assert artifacts == [CONTRACT.artifact(nonce, chain) for nonce, chain in enumerate(chains)]
    artifacts[5]["k_points_steps"][3] = (artifacts[5]["k_points_steps"][3] + 1) % 16
    verdict = ask(node, 40, validation={"artifacts": artifacts}).json()
    assert (verdict["n_mismatch"], verdict["mismatch_nonces"], verdict["fraud_detected"]) == (
        1,
        [5],
        False,
    )
    assert verdict["per_nonce"][5]["n_sphere_mismatches"] == 1


def test_a_round_through_the_stack(node: Node) -> None:
    with Receiver() as receiver:
        body = {
            "block_hash": "b",
            "block_height": 7,
            "public_key": "k",
            "node_id": 0,
            "node_count": 1,
        }
        params = {"model": "tiny-qwen3-256", "seq_len": 32, "decode": True, "max_tokens": 8}
        answer = node.http.post(
            f"{PREFIX}/init/generate", json=body | {"params": params, "url": receiver.url}
        )
        assert answer.status_code == 200, answer.text
        wait_until(lambda: len(receiver.nonces()) >= 20, "20 nonces of the round")
        assert node.status()["config"]["params"]["max_tokens"] == 8
        node.stop()
        wait_until(lambda: node.status()["callbacks_waiting"] == 0, "the last payload")
        first = receiver.round_payloads()[0].body["artifacts"][0]
        assert first["vector_b64"] == ""
        assert len(first["k_points_steps"]) == 9
