"""What hides vLLM's releases, as far as it shows without an engine."""

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from tests.harness.marks import needs_vllm
from workers.engines.ready_schemes import ReadySchemes

pytestmark = pytest.mark.xdist_group("engines")  # whose process has loaded vLLM


class SharedExperts(torch.nn.Module):
    """As vLLM's keep what they have computed, by name and attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._output: list[torch.Tensor | None] = [torch.ones(1), None]

    @property
    def is_free(self) -> bool:
        return self._output == [None, None]


@needs_vllm
def test_after_an_exception_shared_experts_compute_again() -> None:
    from workers.vllm.release import (  # here: it imports vLLM
        model_parts,
    )

    experts = SharedExperts()
    model_parts.forget_unfinished_forward(torch.nn.Sequential(torch.nn.Linear(1, 1), experts))
    assert experts.is_free


@needs_vllm
def test_that_vllms_shared_experts_are_still_called_so() -> None:
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts as VllmsOwn

    assert VllmsOwn.__name__ == SharedExperts.__name__
    assert "_output" in VllmsOwn.__init__.__code__.co_names


class SumsGroup:
    """Two tensor-parallel ranks' group whose own sum tells buffers on the way out of a capture."""

    world_size = 2

    def __init__(self) -> None:
        self.device_communicator = SimpleNamespace(ca_comm=SimpleNamespace(disabled=False))
        self.told: list[bool] = []

    @contextmanager
    def graph_capture(self, context: Any) -> Iterator[Any]:
        try:
            yield context
        finally:
            self.told.append(not self.device_communicator.ca_comm.disabled)


@needs_vllm
@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (None, True, ""),
        (None, False, "another rank could not record its part"),
        (MemoryError("no memory here"), False, "no memory here"),
    ],
    ids=["all record", "another rank fails", "this rank fails"],
)
def test_ranks_tell_no_buffers_where_one_could_not_record(
    here: Exception | None, there: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads as many of each rank as this one recorded, and past the end where it has fewer."""
    from workers.vllm.release import parallel

    group, seen = SumsGroup(), []
    monkeypatch.setattr(parallel, "get_tp_group", lambda: group)
    monkeypatch.setattr(parallel, "_sums_capture", lambda: SimpleNamespace(stream="a stream"))
    monkeypatch.setattr(parallel, "do_all_tensor_ranks", lambda says: says and there)
    failure = None
    try:
        with parallel.recorded_sums() as stream:
            seen.append(stream)
            if here is not None:
                raise here
    except Exception as error:
        failure = error
    assert (str(failure) if failure else "") == said
    assert seen == ["a stream"]
    assert group.told == [not said]
    assert not group.device_communicator.ca_comm.disabled, "chat goes on with it"


class Owner(torch.nn.Module):
    """As vLLM's models own their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity()])
        self.start_layer, self.end_layer = 0, 1


@needs_vllm
@pytest.mark.parametrize(
    "sharing",
    [{"index_topk_freq": 4}, {"index_topk_pattern": "FSSS"}, {"indexer_types": ["full", "shared"]}],
    ids=lambda sharing: next(iter(sharing)),
)
def test_layers_that_attend_to_what_an_earlier_one_chose_are_not_cut(
    sharing: dict[str, Any],
) -> None:
    from workers.vllm.release import model_parts

    model = Owner()
    assert (
        model_parts.layer_owner(
            model, model.layers, SimpleNamespace(index_topk_freq=1, index_topk_pattern=None)
        )
        is model
    )
    assert model_parts.layer_owner(model, model.layers, SimpleNamespace(**sharing)) is None


@needs_vllm
@pytest.mark.parametrize("place", ["common", "launchers", "openai"])  # 0.33, 0.32, up to 0.31
def test_the_servers_arguments_are_found_where_a_release_has_them(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from workers.vllm.release import api_server

    for other in ("common", "launchers", "openai"):
        monkeypatch.setitem(sys.modules, f"vllm.entrypoints.{other}.cli_args", None)
    module = SimpleNamespace(make_arg_parser=lambda parser: (place, parser))
    monkeypatch.setitem(sys.modules, f"vllm.entrypoints.{place}.cli_args", module)
    assert api_server.serve_parser("the parser") == (place, "the parser")


class Decoder(torch.nn.Module):
    """As vLLM's decoders have their final norm, which their logits may have to ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(2)


class NormsInLogits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return self.model.norm(hidden_states)


class NormsInForward(NormsInLogits):
    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return hidden_states


class Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.language_model = inner

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        return self.language_model.compute_logits(hidden_states)  # type: ignore[operator]


@needs_vllm
def test_a_final_norm_that_forward_leaves_to_the_logits_is_found() -> None:
    from workers.vllm.release import model_parts

    left = NormsInLogits()
    assert model_parts.norm_left_to_logits(left) is left.model.norm
    assert model_parts.norm_left_to_logits(Wrapper(left)) is left.model.norm
    assert model_parts.norm_left_to_logits(NormsInForward()) is None
    assert model_parts.norm_left_to_logits(Wrapper(NormsInForward())) is None


@needs_vllm
@pytest.mark.parametrize(
    ("module", "name", "leaves_it"),
    [
        ("vllm.model_executor.models.mimo", "MiMoForCausalLM", True),
        ("vllm.model_executor.models.step3p5", "Step3p5ForCausalLM", True),
        ("vllm.model_executor.models.qwen2", "Qwen2ForCausalLM", False),
        ("vllm.model_executor.models.minimax_m2", "MiniMaxM2ForCausalLM", False),
    ],
)
def test_that_vllms_models_leave_it_there(module: str, name: str, leaves_it: bool) -> None:
    from workers.vllm.release import model_parts

    found = getattr(importlib.import_module(module), name)
    assert model_parts.norms_in_logits(found) == leaves_it


@pytest.mark.parametrize("replicated", [True, False])
def test_a_norm_of_a_part_of_a_sum_is_refused(replicated: bool) -> None:
    """Reflections are linear, so they may stay."""
    schemes = ReadySchemes(
        hidden_size=32, n_layers=2, device=torch.device("cpu"), dtype=torch.float32
    )
    schemes.replicated = replicated
    spec = ProofSpec(block_hash="block", public_key="key", seq_len=8)
    distance = spec.model_copy(update={"scheme": "distance"})
    hooks = distance.model_copy(update={"options": {"randomization": "layer_hooks"}})
    assert schemes.of(spec).transforms_layers
    assert not schemes.of(distance).transforms_layers
    for _ in range(2):  # a scheme that is kept is no way around it
        if replicated:
            assert schemes.of(hooks).transforms_layers
        else:
            with pytest.raises(SpecError, match="use sign_flips, or tensor_parallel 1"):
                schemes.of(hooks)


@needs_vllm
def test_an_operation_that_lacks_an_implementation_is_asked_for_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # vLLM 0.28 to 0.33 have operations on GPUs without a compiled one, as most are on a CPU.
    from vllm.ir.op import IrOp

    from workers.vllm.release import custom_ops

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = {name: op.get_priority() for name, op in IrOp.registry.items()}
    with custom_ops.fused_kernels():
        for name, op in IrOp.registry.items():
            assert set(op.get_priority()) <= set(op.impls), name
            assert op.get_priority(), name
    assert {name: op.get_priority() for name, op in IrOp.registry.items()} == before


@needs_vllm
@pytest.mark.parametrize("name", ["--tool-strict-level", "--tool_strict_level"])
def test_tools_are_held_to_their_schemas_unless_the_operator_says_otherwise(name: str) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from workers.vllm.release import api_server

    parser = api_server.serve_parser(FlexibleArgumentParser())
    api_server.hold_tools_to_schemas(parser)
    assert parser.parse_args([]).tool_strict_level == "parameter"
    assert parser.parse_args([name, "auto"]).tool_strict_level == "auto"


@needs_vllm
def test_releases_without_such_a_level_are_left_alone() -> None:
    from workers.vllm.release import api_server

    parser = argparse.ArgumentParser()
    api_server.hold_tools_to_schemas(parser)
    assert not vars(parser.parse_args([]))
