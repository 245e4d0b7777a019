"""`doctor` on GPUs, by a library that tells what a test says."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from cli.examine import hardware
from cli.examine.findings import Finding
from poc_core.gpus import Gpu, GpuDriver, MachineGpus

DRIVER = GpuDriver(driver_version="580.65", cuda_driver_version="13.0", nvml_version="13")


def machine(*free_gib: float) -> MachineGpus:
    devices = [
        Gpu(
            index=index,
            uuid=f"GPU-{index}",
            name="H200",
            total_memory_mb=140 * 1024,
            free_memory_mb=int(free * 1024),
        )
        for index, free in enumerate(free_gib)
    ]
    return MachineGpus(devices=devices, driver=DRIVER)


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "vllm_runs_on_cpu", lambda: False)
    monkeypatch.setattr(hardware, "vllm_needs_cuda", lambda: True)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ["0", "1"])


def test_free_gpus_are_fine() -> None:
    findings = list(hardware.gpus(machine(139, 139)))
    assert levels(findings) == ["ok"] * 3
    assert findings[0].says == "580.65, for CUDA up to 13.0"
    assert findings[1].says == "H200, 139 of 140 GiB free"


def test_a_driver_without_its_library_for_cuda_is_wrong() -> None:
    without = DRIVER.model_copy(update={"cuda_driver_version": None})
    (found, *_) = hardware.gpus(machine(139).model_copy(update={"driver": without}))
    assert (found.level, "libcuda.so.1" in found.says) == ("problem", True)


def test_a_gpu_that_something_uses_is_worth_a_look() -> None:
    assert levels(list(hardware.gpus(machine(139, 20)))) == ["ok", "ok", "warning"]


def test_a_gpu_that_does_not_answer_is_wrong() -> None:
    broken = MachineGpus(devices=[Gpu(index=0, is_available=False, error_message="GPU is lost")])
    (found, *_) = hardware.gpus(broken)
    assert (found.level, "GPU is lost" in found.says) == ("problem", True)


def test_none_at_all_is_wrong_for_a_build_that_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(list(hardware.gpus(MachineGpus()))) == ["problem"]
    monkeypatch.setattr(hardware, "vllm_needs_cuda", lambda: False)
    assert levels(list(hardware.gpus(MachineGpus()))) == ["ok"]


def test_a_build_for_cpus_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "vllm_runs_on_cpu", lambda: True)
    assert "warning" in levels(list(hardware.gpus(machine(139, 139))))


def test_hidden_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ["0"])
    assert list(hardware.gpus(machine(139, 139)))[-1].says == "CUDA_VISIBLE_DEVICES shows 1 of 2."


def test_a_workers_gpus_are_the_first_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ["GPU-2", "1"])
    assert [gpu.index for gpu in hardware.group_of(machine(1, 1, 1, 1), 2)] == [1, 2]


class FakeNvml(ModuleType):
    class NVMLError(Exception):
        pass

    def __init__(self, links: int) -> None:
        super().__init__("pynvml")
        self._links = links

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetNvLinkState(self, _handle: int, link: int) -> int:
        if link >= 12:
            raise self.NVMLError("Invalid Argument")
        return int(link < self._links)


@pytest.mark.parametrize(
    ("links", "n_gpus", "group_size", "expected"),
    [(12, 2, 2, ["ok"]), (0, 2, 2, ["warning"]), (0, 2, 1, ["ok"]), (0, 1, 1, [])],
)
def test_nvlink_matters_where_gpus_share_a_model(
    monkeypatch: pytest.MonkeyPatch, links: int, n_gpus: int, group_size: int, expected: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(links))
    assert levels(list(hardware.nvlink(machine(*[139] * n_gpus), group_size))) == expected


VIRTUAL = "processor\t: 0\nflags\t\t: fpu sse2 hypervisor lahf_lm\n"


@pytest.mark.parametrize(
    ("cpuinfo", "variable", "n_gpus", "expected"),
    [
        (VIRTUAL, None, 2, ["warning"]),
        (VIRTUAL, "1", 8, ["warning"]),
        (VIRTUAL, "0", 8, []),
        (VIRTUAL, None, 1, []),
        (VIRTUAL.replace("hypervisor ", ""), None, 8, []),
        (None, None, 8, []),
    ],
)
def test_multicast_is_told_of_in_a_virtual_machine_with_several_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpuinfo: str | None,
    variable: str | None,
    n_gpus: int,
    expected: list[str],
) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if variable is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", variable)
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    found = list(hardware.multicast(machine(*[139] * n_gpus), file))
    assert levels(found) == expected
    assert all("NCCL_NVLS_ENABLE=0" in finding.remedy for finding in found)
