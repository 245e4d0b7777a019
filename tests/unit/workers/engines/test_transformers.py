"""The transformers engine: its errors, without a model, and the experts that decode proofs seed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from poc_core.errors import SpecError
from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes.decode import steps
from workers.engines.base import EngineLostError, EngineMemoryError, MicroBatch, Tick
from workers.engines.options import EngineOptions
from workers.engines.transformers import TransformersEngine


class Failing(TransformersEngine):
    """An engine whose forward pass raises `error`."""

    def __init__(self, error: Exception) -> None:
        self.info = ModelInfo("failing", 256, 4, 64, 256, "bfloat16")
        scheme = SimpleNamespace(begin=lambda _nonces, reflected: None)
        self._schemes = cast(Any, SimpleNamespace(of=lambda _spec: scheme))
        self._error = error

    def _run(self, batch: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nOf 139 GiB"), EngineMemoryError),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), EngineMemoryError),
        (MemoryError(), EngineMemoryError),
        (torch.AcceleratorError("an illegal memory access"), EngineLostError),
        (RuntimeError("bad shape"), RuntimeError),
    ],
    ids=["GPU", "CPU", "Python", "a broken GPU", "another error"],
)
def test_short_memory_is_told_apart_on_a_cpu_too(
    error: Exception, becomes: type[Exception]
) -> None:
    spec = ProofSpec(block_hash="b", public_key="k", seq_len=4)
    with pytest.raises(becomes):
        Failing(error).tick(Tick([MicroBatch(spec, range(1), id=0)]))


@pytest.fixture
def experts(tmp_path: Path) -> TransformersEngine:
    """An engine of a tiny Gemma 4 with experts, whose configuration has a name of its own for their
    number per token.
    """
    from transformers import Gemma4TextConfig, Gemma4TextModel

    config = Gemma4TextConfig(
        vocab_size=64, hidden_size=256, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, global_head_dim=32,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, max_position_embeddings=64,
        enable_moe_block=True, num_experts=8, top_k_experts=2,
    )  # fmt: skip
    Gemma4TextModel(config).save_pretrained(tmp_path)
    return TransformersEngine(
        EngineOptions(model=str(tmp_path), engine="transformers", dtype="float32")
    )


def test_decode_proofs_seed_experts_whatever_the_model_calls_their_number(
    experts: TransformersEngine,
) -> None:
    chosen: list[Tensor] = []

    def see(module: nn.Module, _args: Any, output: Any) -> None:
        if type(module).__name__ == "Gemma4TextRouter":
            chosen.append(output[2])

    spec = ProofSpec(
        scheme="decode", block_hash="b", public_key="k", seq_len=4, options={"max_tokens": 1}
    )
    nonces = range(5)
    with nn.modules.module.register_module_forward_hook(see):
        experts.compute_batch(spec, nonces)
    device = torch.device("cpu")
    for place, found in enumerate(chosen):
        step, layer = divmod(place, 2)
        seeds = steps.route_seeds("b", nonces, layer, device)
        first = steps.first_experts(seeds, step, 8).repeat_interleave(1 if step else 4)
        assert torch.equal(found, torch.stack([first, (first + 1) % 8], 1))
    assert len(chosen) == 4


def test_a_model_whose_number_of_experts_is_unknown_computes_no_decode_proofs(
    experts: TransformersEngine, tmp_path: Path
) -> None:
    options = EngineOptions(model=str(tmp_path), engine="transformers", dtype="float32")
    with mock.patch("workers.engines.transformers.n_chosen_experts", return_value=0):
        engine = TransformersEngine(options)
    spec = ProofSpec(
        scheme="decode", block_hash="b", public_key="k", seq_len=4, options={"max_tokens": 1}
    )
    with pytest.raises(SpecError, match="number of experts per token is not known"):
        engine.check_spec(spec)
    engine.check_spec(ProofSpec(block_hash="b", public_key="k", seq_len=4))
