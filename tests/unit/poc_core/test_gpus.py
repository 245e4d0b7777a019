"""What NVML tells of a machine."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from poc_core.gpus import Gpu, GpuDriver, GpuWatch, MachineGpus, read
from tests.harness.samples import Clock

MIB = 1024 * 1024


class FakeNvml(ModuleType):
    """Two GPUs: an H200, and one whose driver tells no utilization or that fell off the bus."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, second_is_lost: bool = False) -> None:
        super().__init__("pynvml")
        self.second_is_lost = second_is_lost
        self.readings = 0

    def nvmlInit(self) -> None:
        self.readings += 1

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1 and self.second_is_lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=1000 * MIB, free=600 * MIB, used=400 * MIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 1:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "13.580.65.06"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_each_device_is_told_with_what_its_driver_knows(library: FakeNvml) -> None:
    known: dict[str, Any] = {
        "name": "NVIDIA H200",
        "total_memory_mb": 1000,
        "free_memory_mb": 600,
        "used_memory_mb": 400,
    }
    found = read("gpu-1")
    assert found.devices == [
        Gpu(index=0, uuid="GPU-0", host="gpu-1", utilization_percent=97, temperature_c=61, **known),
        Gpu(
            index=1, uuid="GPU-1", host="gpu-1", utilization_percent=None, temperature_c=61, **known
        ),
    ]
    assert found.driver == GpuDriver(
        driver_version="580.65.06", cuda_driver_version="13.1", nvml_version="13.580.65.06"
    )


def test_gpus_are_told_without_the_drivers_library_for_cuda(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_libcuda() -> int:
        raise library.NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(library, "nvmlSystemGetCudaDriverVersion", no_libcuda)
    found = read("gpu-1")
    assert len(found.devices) == 2
    assert found.driver == GpuDriver(driver_version="580.65.06", nvml_version="13.580.65.06")


def test_a_device_that_is_lost_does_not_hide_the_others(library: FakeNvml) -> None:
    library.second_is_lost = True
    first, second = read("gpu-1").devices
    assert (first.is_available, second.is_available) == (True, False)
    assert second.error_message == "GPU is lost"


def test_a_machine_without_a_driver_has_none(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise library.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(library, "nvmlInit", no_driver)
    assert read("here") == MachineGpus()


def test_a_reading_serves_for_some_seconds(library: FakeNvml) -> None:
    clock = Clock()
    watch = GpuWatch("here", clock)
    for _ in range(3):
        watch.now()
    clock.now += 11
    watch.now()
    assert library.readings == 2


def test_a_driver_that_fails_as_a_whole_is_said_once_and_asked_again(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> int:
        raise library.NVMLError("Driver/library version mismatch")

    clock = Clock()
    watch = GpuWatch("here", clock)
    with monkeypatch.context() as patch:
        patch.setattr(library, "nvmlDeviceGetCount", fails)
        for _ in range(3):
            assert watch.now() == MachineGpus()
            clock.now += 11
    assert caplog.text.count("version mismatch") == 1
    assert len(watch.now().devices) == 2


def test_a_driver_that_hangs_holds_one_thread_only(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    watch = GpuWatch("here", clock := Clock())
    before = watch.now()
    clock.now += 11

    def hang() -> int:
        hangs.set()
        goes_on.wait(120)
        return 1

    monkeypatch.setattr(library, "nvmlDeviceGetCount", hang)
    monkeypatch.setattr("poc_core.gpus._PATIENCE_S", 0.01)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(watch.now)
        try:
            assert hangs.wait(60)
            assert threads.submit(watch.now).result(60) == before
        finally:
            goes_on.set()
        assert len(first.result(60).devices) == 1
