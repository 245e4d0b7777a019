"""The GPUs, or the cores and the memory, that each worker of this machine gets."""

from typing import Any

import pytest

from cli.machine import model_memory, placement
from cli.shipped import shipped_models
from cli.supervise.follower import deployed_options
from cli.terminal import UsageError
from poc_core.serving.vllm_arguments import read_deployment
from tests.harness.official import official
from workers.engines.options import EngineOptions

TINY = str(shipped_models()["tiny-qwen3"])


def test_each_worker_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = EngineOptions(model=TINY, tensor_parallel=2)
    found = placement.environments(options, [["0", "1"], ["2", "3"]], 2)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0,1", "2,3"]


def test_workers_on_cpus_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(placement, "vllm_runs_on_cpu", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    found = placement.environments(EngineOptions(model=TINY), [], 2)
    assert [env["VLLM_CPU_OMP_THREADS_BIND"] for env in found] == ["0", "2"]
    assert [env["VLLM_CPU_KVCACHE_SPACE"] for env in found] == ["1", "1"]


def test_the_synthetic_engine_needs_nothing() -> None:
    assert placement.environments(EngineOptions(model=TINY, engine="synthetic"), [], 3) == [
        {},
        {},
        {},
    ]


@pytest.mark.parametrize(
    ("options", "fits"), [({}, False), ({"vllm_args": ("--load-format=dummy",)}, True)]
)
def test_a_model_that_its_gpus_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: Any, fits: bool
) -> None:
    monkeypatch.setattr(model_memory, "memory_bytes", lambda _gpus: 1000)
    options = EngineOptions(model=TINY, **options)
    if fits:
        assert len(placement.environments(options, [["0"]], 1)) == 1
    else:
        with pytest.raises(UsageError, match=r"The weights of .* take"):
            placement.environments(options, [["0"]], 1)


def test_a_deployments_workers_fill_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "vllm_runs_on_cpu", lambda: False)
    options = EngineOptions(model=TINY, tensor_parallel=2)
    found = placement.environments_of_most(options, ["0", "1", "2", "3", "4"], None, 1)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0,1", "2,3"]
    synthetic = EngineOptions(model=TINY, engine="synthetic")
    assert placement.environments_of_most(synthetic, ["0", "1"], None, 3) == [{}, {}, {}]


def test_the_networks_deployment_for_two_gpus_is_four_engines_on_eight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "vllm_runs_on_cpu", lambda: False)
    (sent,) = (one for one in official() if one.file == "minimaxm27-H200-node1")
    wanted = read_deployment(sent.model, "auto", sent.words)
    options = deployed_options(wanted, EngineOptions(model=""))
    found = placement.environments_of_most(options, list("01234567"), None, 1)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0,1", "2,3", "4,5", "6,7"]
    assert options.name == sent.name
