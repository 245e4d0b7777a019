"""The transformers engine in float32 against the reference's own numbers, on the shipped models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.families.make import given
from poc_core.errors import ProoflineError, SpecError
from poc_core.records import ProofSpec
from poc_core.schemes.base import PrefillScheme, load_scheme
from tests.harness import golden
from tests.harness.golden import AGREEING_FRACTION, MODELS
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.pipeline import compute_all

# One process loads transformers.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("transformers")]


def load(model: str, **options: Any) -> Engine:
    return load_engine(
        EngineOptions(
            model=golden.model_dir(model), engine="transformers", served_model_name=model, **options
        )
    )


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = load(request.param, dtype="float32")
    yield engine
    engine.close()


def test_describes_its_model(engine: Engine) -> None:
    info = engine.info
    assert (info.hidden_size, info.n_layers, info.max_seq_len, info.dtype) == (
        128,
        4,
        2048,
        "float32",
    )
    assert info.name in MODELS


def test_artifacts_are_the_references(engine: Engine) -> None:
    name = engine.info.name
    errors = np.concatenate(golden.artifact_errors(engine, golden.cases(name, "artifact")))
    assert np.mean(errors <= 0.003) >= AGREEING_FRACTION[name], np.sort(errors)[-5:]


@pytest.mark.parametrize("randomization", ["sign_flips", "layer_hooks"])
def test_distances_are_the_references(engine: Engine, randomization: str) -> None:
    name = engine.info.name
    found = [
        case for case in golden.cases(name, "distance") if case["randomization"] == randomization
    ]
    errors = golden.distance_errors(engine, found)
    limit = 0.002 if name == "tiny-qwen3-moe" else 0.0003
    assert np.mean(errors <= limit) >= AGREEING_FRACTION[name], np.sort(errors)[-5:]


def test_artifacts_do_not_depend_on_their_batch(engine: Engine) -> None:
    spec = ProofSpec(block_hash="block", public_key="key", seq_len=33)
    nonces = [*range(9), 2**63 - 1]
    together = compute_all(engine, spec, nonces)
    alone = [compute_all(engine, spec, [nonce])[0] for nonce in nonces]
    errors = golden.l2(together, alone, 12)
    assert np.mean(errors <= 0.003) >= AGREEING_FRACTION[engine.info.name], sorted(errors)[-5:]


def test_micro_batches_give_the_same_artifacts(engine: Engine) -> None:
    spec = ProofSpec(block_hash="block", public_key="key", seq_len=16)
    split = load(engine.info.name, dtype="float32", max_batch_tokens=40)
    errors = golden.l2(compute_all(engine, spec, range(7)), compute_all(split, spec, range(7)), 12)
    assert np.mean(errors <= 0.003) >= AGREEING_FRACTION[engine.info.name]


def test_no_nonces_have_no_values(engine: Engine) -> None:
    assert compute_all(engine, ProofSpec(block_hash="block", public_key="key", seq_len=8), []) == []


def test_a_seq_len_beyond_the_model_is_refused_with_its_limit(engine: Engine) -> None:
    with pytest.raises(SpecError, match="from 1 to 2048"):
        compute_all(engine, ProofSpec(block_hash="block", public_key="key", seq_len=2049), [0])


def test_the_model_keeps_no_trace_of_a_proof(engine: Engine) -> None:
    for scheme, options in (("artifact", {}), ("distance", {"randomization": "layer_hooks"})):
        spec = ProofSpec(
            scheme=scheme, block_hash="block", public_key="key", seq_len=8, options=options
        )
        compute_all(engine, spec, [1])
    assert all(not module._forward_hooks for module in engine.__dict__["_model"].modules())


def test_a_failed_batch_leaves_no_hooks_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ProofSpec(block_hash="fails", public_key="key", seq_len=8)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("poc_core.schemes.artifact.proof.ArtifactScheme.transform_terms", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        compute_all(engine, spec, [1])
    assert all(not module._forward_hooks for module in engine.__dict__["_model"].modules())


def test_experts_chosen_by_token_get_the_ids_of_the_protocol(tmp_path: Path) -> None:
    """As if the model had been asked for those tokens and had looked up a proof's inputs for
    them.
    """
    from transformers import AutoConfig, AutoModel  # here: seconds, in every process of a run

    fields = {
        name: value for name, value in given("deepseek-v4").items() if name != "quantization_config"
    }
    smaller = {
        "dtype": "float32",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128],
    }
    config = AutoConfig.for_model(**fields | smaller)
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(
                torch.rand(len(buffer), config.n_routed_experts).topk(buffer.shape[1]).indices
            )
    model.save_pretrained(tmp_path)
    spec, nonces = ProofSpec(block_hash="block", public_key="key", seq_len=40), range(3)
    engine = load(str(tmp_path), dtype="float32")
    scheme = load_scheme(
        spec, hidden_size=256, n_layers=3, device=torch.device("cpu"), dtype=torch.float32
    )
    assert isinstance(scheme, PrefillScheme)
    model.embed_tokens.forward = lambda ids: scheme.inputs(nonces)
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(
            lambda *given, index=index: scheme.transform_terms(index, given[-1:])[0]
        )
    with torch.inference_mode():
        states = model.eval()(
            input_ids=scheme.token_ids(nonces, config.vocab_size).long(), use_cache=False
        )
        expected = scheme.finish(nonces, states.last_hidden_state[:, -1])
    assert golden.l2(compute_all(engine, spec, nonces), expected, 12).max() < 1e-5


def test_bfloat16_lies_near_float32() -> None:
    case = golden.cases("tiny-qwen3", "artifact")[0]
    engine = load("tiny-qwen3", dtype="auto")
    values = compute_all(
        engine, golden.artifact_spec(case), [artifact["nonce"] for artifact in case["artifacts"]]
    )
    errors = golden.l2(
        values, [artifact["vector_b64"] for artifact in case["artifacts"]], case["k_dim"]
    )
    assert engine.info.dtype == "bfloat16"
    assert errors.mean() <= 0.03


@pytest.mark.parametrize("model", ["/nonexistent/model", "no such name"])
def test_a_model_that_cannot_be_loaded_is_one_sentence(model: str) -> None:
    with pytest.raises(ProoflineError, match="Cannot load the model"):
        load_engine(EngineOptions(model=model, engine="transformers"))
