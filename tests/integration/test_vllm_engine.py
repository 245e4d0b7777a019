"""The real vLLM engine against the reference's numbers: on the CPU here, on a GPU where there is one."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from poc_core.errors import ProoflineError, SpecError
from poc_core.records import ProofSpec
from tests import golden
from tests.marks import needs_vllm
from workers.engines import load_engine
from workers.engines.base import Engine
from workers.engines.options import EngineOptions

pytestmark = [
    pytest.mark.integration,
    needs_vllm,
]


class Deployment(NamedTuple):
    model: str
    dtype: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __str__(self) -> str:
        return "-".join(map(str, self))


FLOAT32 = [
    Deployment("tiny-qwen3", "float32"),
    Deployment("tiny-llama", "float32"),
    Deployment("tiny-qwen3-moe", "float32"),
    Deployment("tiny-qwen3", "float32", tensor_parallel=2),
    Deployment("tiny-qwen3-moe", "float32", tensor_parallel=2),
    Deployment("tiny-qwen3", "float32", pipeline_parallel=2),
    Deployment("tiny-llama", "float32", pipeline_parallel=2),
]
BFLOAT16 = [
    Deployment("tiny-qwen3", "bfloat16"),
    Deployment("tiny-llama", "bfloat16"),
    Deployment("tiny-qwen3", "bfloat16", tensor_parallel=2),
]


def start(deployment: Deployment, **options) -> Engine:
    return load_engine(
        EngineOptions(
            model=golden.model_dir(deployment.model),
            served_model_name=deployment.model,
            dtype=deployment.dtype,
            tensor_parallel=deployment.tensor_parallel,
            pipeline_parallel=deployment.pipeline_parallel,
            # On a GPU too: compiling takes a minute a start, and a proof's forward does not run the compiled code.
            vllm_args=("--enforce-eager",),
            **options,
        ),
    )


@pytest.fixture(scope="module")
def engine(request) -> Iterator[Engine]:
    ranks = request.param.tensor_parallel * request.param.pipeline_parallel
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        if request.param.tensor_parallel * request.param.pipeline_parallel > 1:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        engine = start(request.param)
        yield engine
        engine.close()


@pytest.mark.parametrize("engine", FLOAT32, indirect=True, ids=str, scope="module")
class TestFloat32:
    def test_artifacts_are_the_references(self, engine):
        name = engine.info.name
        errors = np.concatenate(golden.artifact_errors(engine, golden.cases(name, "artifact")))
        assert np.mean(errors <= 0.003) >= golden.AGREEING_FRACTION[name], np.sort(errors)[-5:]

    def test_distances_are_the_references(self, engine):
        name = engine.info.name
        errors = golden.distance_errors(engine, golden.cases(name, "distance"))
        limit = 0.002 if name == "tiny-qwen3-moe" else 0.0003
        assert np.mean(errors <= limit) >= golden.AGREEING_FRACTION[name], np.sort(errors)[-5:]

    def test_artifacts_do_not_depend_on_their_batch(self, engine):
        spec = ProofSpec(block_hash="block", public_key="key", seq_len=33)
        nonces = [*range(31), 2**63 - 1]
        together = engine.compute(spec, nonces)
        alone = [engine.compute(spec, [nonce])[0] for nonce in nonces]
        errors = golden.l2(together, alone, 12)
        assert np.mean(errors <= 0.003) >= golden.AGREEING_FRACTION[engine.info.name], np.sort(errors)[-5:]

    def test_a_batch_beyond_the_token_budget_is_split(self, engine):
        spec = ProofSpec(block_hash="block", public_key="key", seq_len=1025)
        nonces = range(engine.info.max_batch_tokens // 1025 + 2)
        errors = golden.l2(engine.compute(spec, nonces), [engine.compute(spec, [n])[0] for n in nonces], 12)
        assert np.mean(errors <= 0.003) >= golden.AGREEING_FRACTION[engine.info.name], np.sort(errors)[-5:]

    def test_a_spec_that_the_model_cannot_follow_is_refused_and_the_engine_lives_on(self, engine):
        good = ProofSpec(block_hash="block", public_key="key", seq_len=16)
        before = engine.compute(good, [5])
        with pytest.raises(SpecError, match="from 1 to 2048"):
            engine.compute(good.model_copy(update={"seq_len": 2049}), [0])
        with pytest.raises(ProoflineError, match="k_dim"):
            engine.compute(good.model_copy(update={"options": {"k_dim": 129}}), [0])
        assert engine.compute(good, [5]) == before


@pytest.mark.parametrize("engine", BFLOAT16, indirect=True, ids=str, scope="module")
def test_bfloat16_artifacts_lie_near_those_of_an_h200(engine):
    errors = golden.artifact_errors(engine, golden.cases(engine.info.name, "artifact", "h200", "bfloat16"))
    assert np.concatenate(errors).mean() <= 0.02, [case.mean() for case in errors]
    assert np.concatenate(errors).max() <= 0.05, [case.max() for case in errors]


@pytest.mark.parametrize("engine", BFLOAT16[:2], indirect=True, ids=str, scope="module")
def test_bfloat16_distances_lie_near_those_of_an_h200(engine):
    errors = golden.distance_errors(engine, golden.cases(engine.info.name, "distance", "h200", "bfloat16"))
    assert errors.max() <= 0.001, np.sort(errors)[-5:]
