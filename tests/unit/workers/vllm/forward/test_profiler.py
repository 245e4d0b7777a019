"""Events of the profiler become seconds by step and name, for a made-up GPU and a real CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from poc_core.records import ProofSpec
from poc_core.schemes.base import load_scheme
from workers.vllm.forward import profiler
from workers.vllm.forward.profiler import kernels_of_device, marked, profiled

CPU = torch.device("cpu")


def event(name: str, start_us: float, end_us: float, annotation: bool = False) -> Any:
    span = SimpleNamespace(start=start_us, end=end_us)
    return SimpleNamespace(name=name, time_range=span, is_user_annotation=annotation)


class TestGpu:
    def test_a_kernel_belongs_to_the_range_that_it_began_in(self) -> None:
        events = [
            event("gemm", 300, 500),
            event("proofline.inputs", 0, 100, annotation=True),
            event("mul", 0, 40),
            event("mul", 50, 100),
            event("proofline.reflections", 500, 600, annotation=True),
            event("mul", 500, 600),
            event("mul", 700, 800),
        ]
        busy_s, found = kernels_of_device(events)
        assert busy_s == pytest.approx(490e-6)
        assert {(step, name): round(seconds * 1e6) for step, name, seconds in found} == {
            ("inputs", "mul"): 90,
            ("", "gemm"): 200,
            ("reflections", "mul"): 100,
            ("", "mul"): 100,
        }

    def test_others_ranges_are_no_kernels(self) -> None:
        busy_s, found = kernels_of_device(
            [event("execute_model", 0, 100, annotation=True), event("gemm", 10, 20)]
        )
        assert busy_s == pytest.approx(10e-6)
        assert [name for _, name, _ in found] == ["gemm"]

    def test_kernels_of_two_streams_keep_the_device_busy_once(self) -> None:
        events = [
            event("gemm", 0, 100),
            event("nccl", 20, 60),
            event("nccl", 90, 150),
            event("gemm", 200, 210),
        ]
        busy_s, found = kernels_of_device(events)
        assert busy_s == pytest.approx(160e-6)
        assert sum(seconds for *_, seconds in found) == pytest.approx(210e-6)

    def test_nothing_ran(self) -> None:
        assert kernels_of_device([]) == (0, [])


@pytest.fixture
def scheme() -> Any:
    spec = ProofSpec(block_hash="b", public_key="p", seq_len=8, options={"k_dim": 4})
    return load_scheme(spec, hidden_size=64, n_layers=2, device=CPU, dtype=torch.float32)


def test_a_marked_scheme_gives_the_same_numbers_and_says_which_step_is_which(scheme: Any) -> None:
    watched = marked(scheme)
    nonces = [1, 2]
    found: dict[str, Any] = {}

    def work() -> None:
        x = watched.inputs(nonces)
        terms = watched.transform_terms(1, [x.clone(), 2 * x])
        found["values"] = watched.finish(nonces, torch.mm(terms[0][:, -1], torch.eye(64)))

    busy_s, kernels = profiled(CPU, work)
    plain = scheme.transform_terms(1, [scheme.inputs(nonces).clone()])[0]
    assert found["values"] == scheme.finish(nonces, plain[:, -1])
    assert {step for step, _, _ in kernels} == {"inputs", "reflections", "tail", ""}
    assert ("", "aten::mm") in {(step, name) for step, name, _ in kernels}
    assert ("inputs", "aten::log_") in {(step, name) for step, name, _ in kernels}
    assert ("tail", "aten::sort") in {(step, name) for step, name, _ in kernels}
    assert busy_s == pytest.approx(sum(seconds for *_, seconds in kernels))


@pytest.mark.parametrize("transforms", [True, False])
def test_a_marked_scheme_transforms_layers_where_the_scheme_does(
    scheme: Any, transforms: bool
) -> None:
    scheme.transforms_layers = transforms
    assert marked(scheme).transforms_layers is transforms


def test_norms_are_told_apart_from_what_else_uses_their_operations() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.ReLU())
    with profiler.marked_norms(model), torch.inference_mode():
        _, kernels = profiled(CPU, lambda: model(torch.ones(2, 8)))
    steps = {name: step for step, name, _ in kernels}
    assert (steps["aten::native_layer_norm"], steps["aten::relu"]) == ("norms", "")
    with torch.inference_mode():
        _, kernels = profiled(CPU, lambda: model(torch.ones(2, 8)))
    assert {step for step, _, _ in kernels} == {""}


def test_the_matrix_peak_is_that_of_a_large_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_PEAK_S", 0.001)
    assert 1e8 < profiler.matrix_peak(CPU, torch.float32) < 1e14
    assert profiler.device_name(CPU) == "CPU"
