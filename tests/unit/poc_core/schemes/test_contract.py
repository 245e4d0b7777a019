"""What holds for the contract of every scheme."""

import json
from typing import Any

import pytest

from poc_core.errors import SpecError
from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes import scheme_names
from poc_core.schemes.contract import Contract, contract_of, contracts, recognised
from tests.harness.samples import distance_body, round_body

HIDDEN = 256
INFO = ModelInfo(
    "m", hidden_size=HIDDEN, n_layers=4, max_seq_len=1024, max_batch_tokens=512, dtype="float32"
)

every_scheme = pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract.name)


def spec_of(contract: Contract, **options: Any) -> ProofSpec:
    needed = {"max_tokens": 5} if "max_tokens" in contract.options.model_fields else {}
    return ProofSpec(
        scheme=contract.name, block_hash="b", public_key="k", seq_len=64, options=needed | options
    )


@every_scheme
def test_a_contract_has_the_name_of_its_folder(contract: Contract) -> None:
    assert contract_of(contract.name) is contract


def test_there_is_one_for_each_scheme() -> None:
    assert [contract.name for contract in contracts()] == scheme_names()
    with pytest.raises(SpecError, match="use one of artifact, decode, distance"):
        contract_of("unknown")


@every_scheme
def test_a_round_can_be_told_from_the_body_that_started_it(contract: Contract) -> None:
    assert contract.round_body is not None
    for example in contract.round_body.examples.values():
        body = contract.round_body.model_validate(example["value"])
        said = contract.round_body.of(body.config(body.served_model or "tiny-qwen3", 32))
        assert all(
            said[name] == value for name, value in example["value"].items() if name != "params"
        )
        assert example["value"].get("params", {}).items() <= said.get("params", {}).items()
        assert contract.round_body.model_validate(said).spec() == body.spec()


@every_scheme
def test_answers_hold_the_artifacts_that_callbacks_hold(contract: Contract) -> None:
    values = contract.synthetic_values(spec_of(contract), [3, 2**63 - 1], HIDDEN)
    texts = [json.dumps(value).encode() for value in values]
    answered = json.loads(contract.artifacts_json([b"3", b"9223372036854775807"], texts))
    assert answered == [contract.artifact(3, values[0]), contract.artifact(2**63 - 1, values[1])]
    assert contract.artifacts_json([], []) == b"[]"


@every_scheme
def test_a_sequence_longer_than_a_micro_batch_is_beyond_the_limits(contract: Contract) -> None:
    asked, most = contract.limits(spec_of(contract), INFO)["seq_len"]
    assert (asked, most) == (64, 512)


@every_scheme
def test_the_synthetic_engine_refuses_what_the_engines_refuse(contract: Contract) -> None:
    with pytest.raises(SpecError, match=f"The {contract.name} scheme has no option other"):
        contract.synthetic_values(spec_of(contract, other=1), [0], HIDDEN)


@every_scheme
def test_every_value_can_be_shown_in_a_table(contract: Contract) -> None:
    (value,) = contract.synthetic_values(spec_of(contract), [0], HIDDEN)
    assert contract.cell(value)
    assert contract.column != Contract.column


def test_a_body_is_recognised_by_its_marks() -> None:
    names = [
        recognised(body, contracts()).name
        for body in (distance_body(), round_body(), {}, {"r_target": None})
    ]
    assert names == ["distance", "artifact", "artifact", "distance"]


def test_where_one_scheme_is_possible_every_body_is_its_own() -> None:
    assert recognised({}, [contract_of("distance")]).name == "distance"
    assert recognised({"r_target": 1}, [contract_of("artifact")]).name == "artifact"
