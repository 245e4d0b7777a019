"""The real vLLM engine against the reference's numbers: on the CPU here, on a GPU where there
is one.
"""

import dataclasses
import os
import uuid
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
import torch
from pydantic import JsonValue

from lab.measure import speed
from poc_core.errors import ProoflineError, SpecError
from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes.decode.limits import ChainLimits
from tests.harness import golden
from tests.harness.chat_beside import answers_alone_and_beside
from tests.harness.chat_client import PROMPTS
from tests.harness.marks import needs_vllm
from tests.harness.waiting import wait_until
from tests.integration.processes import command_of, descendants
from tests.stacks.deployments import BFLOAT16, EXPERTS, FLOAT32, PIPELINED, QWEN3
from workers.engines.base import Engine, EngineLostError, MicroBatch, Slice, Tick
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("engines"),
    needs_vllm,
]


# What measures speed is a tool, of ranks and stages too.
MEASURED = [QWEN3, *(pytest.param(one, marks=pytest.mark.slow) for one in (EXPERTS, PIPELINED))]
# Between the tokens of every answer, and more of them than chat's small cache has blocks.
PROOFS = ProofSpec(block_hash="block", public_key="key", seq_len=256)


@pytest.fixture
def small_batches(vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of a quarter of the usual tokens: two of them take a quarter of the time."""
    info = dataclasses.replace(vllm_engine.info, max_batch_tokens=2050)
    monkeypatch.setattr(vllm_engine, "info", info)


@pytest.mark.parametrize("vllm_engine", FLOAT32, indirect=True, ids=str, scope="session")
class TestFloat32:
    def test_artifacts_are_the_references(self, vllm_engine: Engine) -> None:
        name = vllm_engine.info.name
        errors = np.concatenate(golden.artifact_errors(vllm_engine, golden.cases(name, "artifact")))
        assert np.mean(errors <= 0.003) >= golden.AGREEING_FRACTION[name], np.sort(errors)[-5:]

    def test_distances_are_the_references(self, vllm_engine: Engine) -> None:
        name = vllm_engine.info.name
        errors = golden.distance_errors(vllm_engine, golden.cases(name, "distance"))
        limit = 0.002 if name == "tiny-qwen3-moe" else 0.0003
        assert np.mean(errors <= limit) >= golden.AGREEING_FRACTION[name], np.sort(errors)[-5:]

    def test_artifacts_do_not_depend_on_their_batch(self, vllm_engine: Engine) -> None:
        spec = ProofSpec(block_hash="block", public_key="key", seq_len=33)
        nonces = [*range(31), 2**63 - 1]
        together = compute_all(vllm_engine, spec, nonces)
        alone = [compute_all(vllm_engine, spec, [nonce])[0] for nonce in nonces]
        errors = golden.l2(together, alone, 12)
        assert np.mean(errors <= 0.003) >= golden.AGREEING_FRACTION[vllm_engine.info.name], np.sort(
            errors
        )[-5:]

    def test_a_fetch_brings_a_micro_batch_and_loses_none_behind_it(
        self, vllm_engine: Engine
    ) -> None:
        specs = {
            10_000 + n: ProofSpec(block_hash=f"block{n}", public_key="key", seq_len=64)
            for n in range(3)
        }
        answers = []
        for own, spec in specs.items():
            for stage in vllm_engine.stages:
                begin = [MicroBatch(spec, range(9), id=own)] if stage.start == 0 else []
                answers.append(vllm_engine.tick(Tick(begin, [Slice(own, stage.start, stage.stop)])))
        for own in specs:
            answers.append(vllm_engine.tick(Tick(fetch=own)))
            assert any(own in answer.values for answer in answers)
        values = {own: found for answer in answers for own, found in answer.values.items()}
        assert values == {
            own: compute_all(vllm_engine, spec, range(9)) for own, spec in specs.items()
        }
        # A rank may tell only now how long something took that ended before.
        told = [
            one for answer in answers for one, _seconds in answer.ran if one.micro_batch in specs
        ]
        assert sorted(told) == [
            Slice(own, stage.start, stage.stop) for own in specs for stage in vllm_engine.stages
        ]

    @pytest.mark.usefixtures("small_batches")
    def test_a_batch_beyond_the_token_budget_is_split(self, vllm_engine: Engine) -> None:
        spec = ProofSpec(block_hash="block", public_key="key", seq_len=1025)
        nonces = range(vllm_engine.info.max_batch_tokens // 1025 + 2)
        errors = golden.l2(
            compute_all(vllm_engine, spec, nonces),
            [compute_all(vllm_engine, spec, [n])[0] for n in nonces],
            12,
        )
        assert np.mean(errors <= 0.003) >= golden.AGREEING_FRACTION[vllm_engine.info.name], np.sort(
            errors
        )[-5:]

    @pytest.mark.parametrize(
        "spec",
        [
            ProofSpec(block_hash="block", public_key="key", seq_len=33),
            ProofSpec(
                block_hash="block", public_key="key", seq_len=200, options={"stronger_rng": True}
            ),
            ProofSpec(
                scheme="distance",
                block_hash="block",
                public_key="key",
                seq_len=64,
                options={"randomization": "layer_hooks"},
            ),
        ],
        ids=lambda spec: f"{spec.scheme}-{spec.seq_len}",
    )
    @pytest.mark.usefixtures("small_batches")
    def test_slices_change_no_bit_of_any_value(self, vllm_engine: Engine, spec: ProofSpec) -> None:
        assert vllm_engine.sliceable
        # Two micro-batches, which meet in a pipeline.
        nonces = range(vllm_engine.info.max_batch(spec.seq_len) + 5)
        whole = compute_all(vllm_engine, spec, nonces)
        assert compute_all(vllm_engine, spec, nonces, SlicePlan(0.0, 1)) == whole
        assert None not in whole

    def test_a_spec_that_the_model_cannot_follow_is_refused_and_the_engine_lives_on(
        self, vllm_engine: Engine
    ) -> None:
        good = ProofSpec(block_hash="block", public_key="key", seq_len=16)
        before = compute_all(vllm_engine, good, [5])
        with pytest.raises(SpecError, match="from 1 to 2048"):
            compute_all(vllm_engine, good.model_copy(update={"seq_len": 2049}), [0])
        with pytest.raises(ProoflineError, match="k_dim"):
            compute_all(vllm_engine, good.model_copy(update={"options": {"k_dim": 129}}), [0])
        with pytest.raises(SpecError, match="hidden size of 256"):
            compute_all(
                vllm_engine,
                good.model_copy(update={"scheme": "decode", "options": {"max_tokens": 2}}),
                [0],
            )
        assert (
            ChainLimits.of(vllm_engine.info).kept_tokens is None
        )  # no memory is held for what it cannot compute
        assert compute_all(vllm_engine, good, [5]) == before


@pytest.mark.parametrize("vllm_engine", MEASURED, indirect=True, ids=str, scope="session")
def test_its_speed_is_measured_and_its_time_told_by_part(
    vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        vllm_engine, "info", dataclasses.replace(vllm_engine.info, max_batch_tokens=1024)
    )
    spec = ProofSpec(block_hash="block", public_key="key", seq_len=64)
    before = compute_all(vllm_engine, spec, range(4))
    found = speed.measure(vllm_engine, spec, [2, 8], 50, [50], seconds=0, on_step=lambda: None)
    assert all(one.nonces_per_s > 0 for pair in found.sizes for one in pair)
    assert [whole.n_slices for whole, _ in found.sizes] == [1, 1]
    parts = found.parts
    assert parts is not None
    for part in ("inputs", "matrix products, attention", "reflections", "norms", "tail"):
        assert 0 < parts.seconds[part] < parts.total_s, part
    assert (parts.seconds["communication"] > 0) == (parts.n_devices > 1)
    assert parts.n_stages == len(vllm_engine.stages)
    assert 0.9 < parts.flops / parts.n / flops_of_a_nonce(vllm_engine.info, spec.seq_len) < 1.1
    assert parts.peak_flops > 1e9
    assert compute_all(vllm_engine, spec, range(4)) == before


@pytest.mark.parametrize("vllm_engine", [QWEN3], indirect=True, ids=str, scope="session")
def test_a_lone_rank_computes_in_the_engine_core(
    vllm_engine: Engine, own_cores: list[psutil.Process]
) -> None:
    """A process less that imports vLLM."""
    assert len(own_cores) == 1
    # Those of an engine that was closed just now may still end.
    wait_until(
        lambda: not any("VLLM::Worker" in command_of(one) for one in descendants(os.getpid())),
        "no worker process",
    )
    connections = own_cores[0].net_connections()
    assert [one for one in connections if one.status == psutil.CONN_LISTEN] == []


def flops_of_a_nonce(info: ModelInfo, seq_len: int) -> float:
    """Of the tiny models' matrix products and attention: hidden 128, 4 heads of 32, 2 of them
    for keys and values.
    """
    attention = 128 * (128 + 64 + 64) + 128 * 128
    mlp = (
        128 * 8 + 2 * 3 * 128 * 64 if info.name == "tiny-qwen3-moe" else 3 * 128 * 256
    )  # router and 2 experts of 64
    return info.n_layers * seq_len * (2 * (attention + mlp) + 4 * 128 * (seq_len + 1) / 2)


def greedy(engine: Engine) -> list[int]:
    """Tokens of an answer that the engine gives to a prompt of several blocks, which it has not
    cached.
    """
    from vllm import SamplingParams

    llm, name = engine._llm, uuid.uuid4().hex  # type: ignore[attr-defined]
    prompt = {"prompt_token_ids": [index % 50 + 10 for index in range(300)], "cache_salt": name}
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def answer() -> list[int]:
        last = [output async for output in llm.generate(prompt, sampling, name)][-1]
        return list(last.outputs[0].token_ids)

    found: list[int] = engine._await(answer(), 120)  # type: ignore[attr-defined]
    return found


# On CPUs vLLM 0.25 has no buffers for what a later stage takes when it chats, unless it compiles
# the model.
CHATTING = [QWEN3, EXPERTS, *([PIPELINED] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("vllm_engine", CHATTING, indirect=True, ids=str, scope="session")
def test_chat_between_two_slices_finds_a_clean_engine_and_leaves_one(vllm_engine: Engine) -> None:
    spec = ProofSpec(block_hash="block", public_key="key", seq_len=100)
    nonces = range(7)
    expected, alone = compute_all(vllm_engine, spec, nonces), greedy(vllm_engine)
    compute_all(vllm_engine, spec.model_copy(update={"block_hash": "other"}), nonces)
    own = 1_000_000
    values: dict[int, Sequence[JsonValue]] = {}
    for stage in vllm_engine.stages:
        for layer in stage:
            begin = [MicroBatch(spec, nonces, id=own)] if layer == 0 else []
            values |= vllm_engine.tick(
                Tick(begin, [Slice(own, layer, layer + 1)], wait=True)
            ).values
            assert greedy(vllm_engine) == alone, f"after layer {layer}"
    assert values == {own: expected}


@pytest.mark.parametrize("vllm_engine", BFLOAT16, indirect=True, ids=str, scope="session")
def test_bfloat16_artifacts_lie_near_those_of_an_h200(vllm_engine: Engine) -> None:
    errors = golden.artifact_errors(
        vllm_engine, golden.cases(vllm_engine.info.name, "artifact", "h200", "bfloat16")
    )
    assert np.concatenate(errors).mean() <= 0.02, [case.mean() for case in errors]
    assert np.concatenate(errors).max() <= 0.05, [case.max() for case in errors]


@pytest.mark.parametrize("vllm_engine", BFLOAT16[:2], indirect=True, ids=str, scope="session")
def test_bfloat16_distances_lie_near_those_of_an_h200(vllm_engine: Engine) -> None:
    errors = golden.distance_errors(
        vllm_engine, golden.cases(vllm_engine.info.name, "distance", "h200", "bfloat16")
    )
    assert errors.max() <= 0.001, np.sort(errors)[-5:]


@pytest.mark.ends_its_stack
@pytest.mark.parametrize("vllm_engine", [PIPELINED], indirect=True, ids=str, scope="session")
def test_an_idle_engine_whose_core_is_killed_is_lost(
    vllm_engine: Engine, own_cores: list[psutil.Process]
) -> None:
    def is_lost() -> bool:
        try:
            vllm_engine.check()
        except EngineLostError:
            return True
        return False

    assert not is_lost()
    own_cores[0].kill()
    wait_until(is_lost, "the engine's end")


@pytest.mark.slow
@pytest.mark.parametrize("vllm_engine", [EXPERTS], indirect=True, ids=str, scope="session")
def test_greedy_answers_of_a_mixture_of_experts_beside_proofs_are_those_without(
    vllm_engine: Engine,
) -> None:
    alone, beside, n_nonces = answers_alone_and_beside(
        vllm_engine, lambda: len(compute_all(vllm_engine, PROOFS, range(16)))
    )
    assert n_nonces > len(PROMPTS), "there were no proofs beside chat"
    assert [answer.tokens for answer in beside] == [answer.tokens for answer in alone]
