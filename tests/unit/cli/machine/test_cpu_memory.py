"""How much memory vLLM is told to set aside on a CPU."""

import os
import sys
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from cli.machine import cgroup, cpu_memory
from cli.machine.cpu_memory import GIB, available_bytes, kv_cache_environment
from cli.main import app
from cli.shipped import shipped_models


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(cpu_memory, "visible_gpus", list)


@pytest.mark.parametrize(
    ("free_gib", "processes", "gib"), [(64, 1, 4), (16, 2, 2), (8, 1, 2), (3, 1, 1), (0, 4, 1)]
)
def test_a_quarter_of_what_is_free_is_shared_out(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, processes: int, gib: int
) -> None:
    monkeypatch.setattr(cpu_memory, "available_bytes", lambda: free_gib * GIB)
    assert kv_cache_environment("/models/large", processes) == {"VLLM_CPU_KVCACHE_SPACE": str(gib)}


def test_a_shipped_model_needs_little() -> None:
    assert kv_cache_environment(str(shipped_models()["tiny-qwen3"]), 1) == {
        "VLLM_CPU_KVCACHE_SPACE": "1"
    }


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    assert kv_cache_environment("/models/large", 1) == {}


def test_gpus_have_their_own_rules_unless_vllm_leaves_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_memory, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(cpu_memory, "vllm_runs_on_cpu", lambda: False)
    assert kv_cache_environment("/models/large", 1) == {}
    monkeypatch.setattr(cpu_memory, "vllm_runs_on_cpu", lambda: True)
    assert kv_cache_environment("/models/large", 1) != {}


def test_a_container_may_take_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cgroups of both versions: tests/unit/cli/machine/test_sensors.py."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=8000, total=9000)
    )
    for used, limit, left in ((1000, 9000, 8000), (2000, 5000, 3000)):
        monkeypatch.setattr(cgroup, "working_memory", lambda u=used, m=limit: (u, m))
        assert available_bytes() == left


def test_where_nothing_is_known_nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[int, int]:
        raise OSError

    monkeypatch.setattr(cgroup, "working_memory", unknown)
    assert available_bytes() == 0


def test_a_worker_started_by_itself_sets_as_much_aside_as_one_of_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    set_aside = []

    def run_worker(*_: object) -> None:
        set_aside.append(os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None))

    fake = SimpleNamespace(run_worker=run_worker)
    monkeypatch.setitem(sys.modules, "workers.main", fake)
    monkeypatch.setattr("cli.run.worker.end_process", lambda: None)
    for engine in ("vllm", "synthetic"):
        CliRunner().invoke(
            app, ["worker", "--model", "tiny-qwen3", "--engine", engine], catch_exceptions=False
        )
    assert set_aside == ["1", None]
