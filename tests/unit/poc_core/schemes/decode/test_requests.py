"""Which bodies ask for decode proofs, and what is wrong with others."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from poc_core.errors import BodyError, ClaimsError
from poc_core.records import ModelInfo
from poc_core.schemes.artifact.terms import StatTest
from poc_core.schemes.contract import contracts, recognised
from poc_core.schemes.decode.contract import CONTRACT
from poc_core.schemes.decode.limits import ChainLimits
from poc_core.schemes.decode.requests import MOST_CLAIMED_POINTS, DecodeBody, DecodeRoundBody
from tests.harness.samples import body

STEPS = {"decode": True, "max_tokens": 4}


def decode_body(**changes: Any) -> dict[str, Any]:
    return body(**{"params": STEPS} | changes)


def claims(*chains: Any) -> dict[str, Any]:
    return {
        "artifacts": [
            {"nonce": nonce, "k_points_steps": chain} for nonce, chain in enumerate(chains)
        ]
    }


@pytest.mark.parametrize(
    ("params", "scheme"),
    [
        ({}, "artifact"),
        ({"scheme": "prefill"}, "artifact"),
        ({"decode": False, "max_tokens": 256}, "artifact"),
        ({"max_tokens": 256}, "artifact"),
        ({"scheme": "decode", "max_tokens": 4}, "decode"),
        ({"decode": True, "max_tokens": 1}, "decode"),
        ({"scheme": "decode", "decode": True, "max_tokens": 4}, "decode"),
        ({"scheme": "prefill", "decode": True, "max_tokens": 4}, "decode"),
    ],
)
def test_a_body_is_recognised(params: dict[str, Any], scheme: str) -> None:
    sent = body(params=params)
    contract = recognised({"params": sent["params"]}, contracts())
    assert contract.name == scheme
    assert contract.job_body is not None
    assert contract.job_body.model_validate(sent).spec().scheme == scheme


@pytest.mark.parametrize(
    "params",
    [
        {"decode": True},
        {"decode": True, "max_tokens": 0},
        STEPS | {"seq_len": 0},
        STEPS | {"scheme": "other"},
        STEPS | {"x": 1},
    ],
)
def test_params_that_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DecodeBody.model_validate(body(params=params))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"scheme": "chain"}, "Input should be 'prefill' or 'decode'"),
        ({"decode": "yes"}, "Input should be true or false"),
        ({"decode": 1}, "Input should be true or false"),
    ],
)
def test_params_that_select_no_scheme_get_both_values(params: dict[str, Any], message: str) -> None:
    sent = body(params=params)
    contract = recognised({"params": sent["params"]}, contracts())
    assert contract.job_body is not None
    with pytest.raises(ValidationError) as refused:
        contract.job_body.model_validate(sent)
    assert [error["msg"] for error in refused.value.errors()] == [message]


def test_what_the_chain_sends_is_enough() -> None:
    """No k_dim, no batch_size, no scheme."""
    sent = body(params={"seq_len": 256, "decode": True, "max_tokens": 256})
    del sent["params"]["k_dim"], sent["nonces"]
    found = DecodeRoundBody.model_validate(sent)
    assert found.requested_batch_size is None
    assert found.spec().options == {
        "max_tokens": 256,
        "per_nonce_reflection": False,
        "k_dim": 12,
        "enforced": None,
    }
    config = found.config("tiny-qwen3-256", 32)
    assert DecodeRoundBody.of(config)["params"] == {
        "model": "tiny-qwen3-256", "seq_len": 256, "k_dim": 12, "scheme": "decode",
        "decode": True, "max_tokens": 256,
    }  # fmt: skip


def test_batches_of_0_are_the_nodes_own_size() -> None:
    assert DecodeBody.model_validate(decode_body(batch_size=0)).batch_size == 0
    assert DecodeRoundBody.model_validate(decode_body(batch_size=0)).batch_size == 0


def test_stronger_inputs_are_not_asked_for() -> None:
    plain, stronger = decode_body(), decode_body(poc_stronger_rng=True)
    assert DecodeBody.model_validate(stronger).spec() == DecodeBody.model_validate(plain).spec()


@pytest.mark.parametrize(
    ("stat_test", "dist_threshold"),
    [(None, 0.025), ({"p_mismatch": 0.1}, 0.02), ({"dist_threshold": 0.05}, 0.05)],
)
def test_the_threshold(stat_test: Any, dist_threshold: float) -> None:
    terms = DecodeBody.model_validate(decode_body(stat_test=stat_test)).terms(
        honour_p_value_threshold=False
    )
    assert StatTest.model_validate(terms).dist_threshold == dist_threshold


def test_claims_determine_the_values() -> None:
    chains = [[1, 2, 3, 4, 5], [16, -3, "x", None, True], [0]]
    found = DecodeBody.model_validate(decode_body(validation=claims(*chains)))
    assert found.claims() == {0: True, 1: True, 2: True}
    # What is no point is no point, whatever it is: a cheater must not make the request fail.
    assert found.spec().options["enforced"] == {
        "0": [1, 2, 3, 4, 5],
        "1": [16, -1, -1, -1, -1],
        "2": [0],
    }


@pytest.mark.parametrize("vector", [None, 5, [], "no base64"])
@pytest.mark.parametrize("chain", ["AQIDBAU=", 5, {}, True])
def test_a_claim_that_is_no_chain_is_a_wrong_one(chain: Any, vector: Any) -> None:
    sent = decode_body(validation=claims([1, 2, 3, 4, 5], chain, [0]))
    for artifact in sent["validation"]["artifacts"]:
        artifact["vector_b64"] = vector
    found = DecodeBody.model_validate_json(json.dumps(sent)).spec().options["enforced"]
    assert found == {"0": [1, 2, 3, 4, 5], "1": [-1], "2": [0]}


def test_an_enforced_claim_that_is_no_chain_is_a_wrong_one() -> None:
    sent = decode_body(nonces=[0], validation=claims([1]), enforced_k_steps={"0": "AQIDBAU="})
    found = DecodeBody.model_validate_json(json.dumps(sent))
    assert found.spec().options["enforced"] == {"0": [-1]}


def test_enforced_steps_are_taken_in_the_place_of_the_artifacts() -> None:
    sent = decode_body(nonces=[0], validation=claims([]), enforced_k_steps={"0": [1, 2]})
    assert DecodeBody.model_validate_json(json.dumps(sent)).spec().options["enforced"] == {
        "0": [1, 2]
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"validation": claims([1], [2])},
        {"validation": claims([1], [2], [3], [4])},
        {"validation": claims([1], [2], [])},
        {"validation": claims([1], [2], None)},
        {"validation": claims([1], [2], [3]), "enforced_k_steps": {"0": [1]}},
    ],
)
def test_claims_of_other_nonces_or_without_steps_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ClaimsError):
        DecodeBody.model_validate_json(json.dumps(decode_body(**changes))).claims()


def test_too_many_claims_are_refused() -> None:
    sent = decode_body(nonces=[0], validation=claims([1] * (MOST_CLAIMED_POINTS + 1)))
    with pytest.raises(BodyError, match="at a time"):
        DecodeBody.model_validate(sent).claims()


@pytest.mark.parametrize(
    ("hidden_size", "max_seq_len", "problem"),
    [(128, 1024, "hidden size of 256"), (256, 67, "68 together"), (256, 68, None)],
)
def test_what_a_model_cannot_do(hidden_size: int, max_seq_len: int, problem: str | None) -> None:
    info = ModelInfo("m", hidden_size, 4, max_seq_len, 8192, "float32")
    spec = DecodeBody.model_validate(decode_body()).spec()
    if problem is None:
        assert CONTRACT.limits(spec, info)["seq_len"][0] == 64
        return
    with pytest.raises(BodyError, match=problem):
        CONTRACT.limits(spec, info)


def test_what_an_engine_cannot_do_is_said_when_it_is_asked() -> None:
    """By the engine's own sentence, or the room that it has."""
    info = ModelInfo("m", 256, 4, 1024, 8192, "float32")
    spec = DecodeBody.model_validate(decode_body()).spec()  # 64 positions and 4 steps
    refusals = {
        "cannot be seeded": ChainLimits(no_chains="its router cannot be seeded").on(info),
        "68 together; there is memory for 95": ChainLimits(kept_tokens=95, kept_block=32).on(info),
        "68 together; there is memory for 56": ChainLimits(
            kept_tokens=96, kept_block=32, kept_state=40
        ).on(info),
        r"memory for 0 \(--decode-memory-gb\)": ChainLimits(kept_tokens=32, kept_state=40).on(info),
    }
    for problem, refusing in refusals.items():
        with pytest.raises(BodyError, match=problem):
            CONTRACT.limits(spec, refusing)
    assert CONTRACT.limits(spec, ChainLimits(kept_tokens=96, kept_block=32).on(info))
    claimed = spec.model_copy(update={"options": {**spec.options, "enforced": {"0": [1]}}})
    # One forward keeps nothing.
    assert CONTRACT.limits(claimed, refusals["68 together; there is memory for 95"])
    with pytest.raises(BodyError, match="68 tokens of one forward"):
        CONTRACT.limits(claimed, dataclasses.replace(info, max_batch_tokens=67))
    # Too few for the positions alone, which is said of every proof.
    few = dataclasses.replace(info, max_batch_tokens=63)
    assert CONTRACT.limits(claimed, few) == {"seq_len": (64, 63)}


def test_how_many_nonces_a_micro_batch_holds() -> None:
    plain = ModelInfo("m", 256, 4, 1024, 8192, "float32", max_sequences=200)
    info = ChainLimits(kept_tokens=9600, kept_block=32).on(plain)
    spec = DecodeBody.model_validate(decode_body()).spec()  # 64 positions and 4 steps
    long = spec.model_copy(update={"options": {**spec.options, "max_tokens": 1000}})
    claimed = spec.model_copy(update={"options": {**spec.options, "enforced": {"0": [1]}}})
    assert info.max_batch(64) == 128
    assert CONTRACT.max_batch(spec, info) == 100  # 96 kept of each
    assert CONTRACT.max_batch(long, info) == 8
    assert CONTRACT.max_batch(claimed, info) == 8192 // 68  # one forward keeps nothing
    assert CONTRACT.max_batch(spec, plain) == 120
    # Linear attention's states take as much memory as 64 more positions of each.
    states = ChainLimits(kept_tokens=9600, kept_block=32, kept_state=64).on(plain)
    assert CONTRACT.max_batch(spec, states) == 60
    assert CONTRACT.max_batch(claimed, states) == 8192 // 68
    assert CONTRACT.max_batch(spec, ChainLimits(kept_tokens=1 << 20).on(plain)) == 200


def test_no_micro_batch_exceeds_a_cuda_grid_of_sequences_and_64_heads() -> None:
    info = ModelInfo("m", 256, 4, 1024, 32_768, "bfloat16", max_sequences=2048)
    spec = DecodeBody.model_validate(decode_body()).spec()
    most = CONTRACT.max_batch(spec, ChainLimits(kept_tokens=1 << 20).on(info))
    assert info.max_batch(8) == most == 65_535 // 64


def test_workers_together_can_do_what_each_of_them_can() -> None:
    info = ModelInfo("m", 256, 4, 1024, 8192, "float32")
    one = ChainLimits(codebook="a", kept_tokens=96, kept_block=16).on(info)
    other = ChainLimits(codebook="a", kept_tokens=640, kept_block=32, kept_state=7).on(info)
    assert ChainLimits.common([one, other, info]) == ChainLimits(
        codebook="a", kept_tokens=96, kept_block=32, kept_state=7
    )
    assert (
        "different codebooks"
        in ChainLimits.common([one, ChainLimits(codebook="b").on(info)]).no_chains
    )
    refusing = ChainLimits(no_chains="its router cannot be seeded").on(info)
    assert ChainLimits.common([one, refusing]).no_chains == "its router cannot be seeded"


def test_a_model_too_narrow_is_422(client: TestClient, serve: Callable[..., Any]) -> None:
    serve("w1")
    answer = client.post("/api/v1/pow/generate", json=decode_body())
    assert answer.status_code == 422
    assert "hidden size of 256" in answer.json()["detail"][0]["msg"]
