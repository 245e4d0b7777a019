"""What a machine's sensors say: by a test's own NVML, and by this machine's files."""

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from api.node_metrics.families import GPU, HOST
from cli.machine.cgroup import Memory, container_memory, working_memory
from cli.machine.sensors import Sensors, cpu_times, machine_sensors
from poc_core.machine_figures import GpuFigures
from tests.harness.samples import Clock

GIB = 1024**3


class FakeNvml(ModuleType):
    """An H200 with all sensors, and a card that has a temperature and nothing else."""

    NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT = 0, 3, 10
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_FI_DEV_MEMORY_TEMP = 0, 1, 82
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC = 1, 1
    nvmlEventTypeXidCriticalError = 8

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.value = value

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.events: list[tuple[int, int]] = []  # (device, XID) to be told
        self.listens_to: list[int] = []
        self.freed: list[object] = []
        self.n_open = 0
        self.is_lost = False
        self.memory_temperature = 88

    def nvmlInit(self) -> None:
        self.n_open += 1

    def nvmlShutdown(self) -> None:
        self.n_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def _check(self, handle: int) -> None:
        if self.is_lost and handle == 0:
            raise self.NVMLError(15)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._check(index)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        self._check(handle)
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200" if handle == 0 else "A card"

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._check(handle)
        return 61

    def _of_the_first(self, value: float) -> Callable[..., float]:
        def ask(handle: int, *_which: int) -> float:
            if handle != 0 or self.is_lost:
                raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
            return value

        return ask

    def __getattr__(self, name: str) -> Callable[..., float]:
        values = {
            "nvmlDeviceGetPowerUsage": 312_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetMaxClockInfo": 1985,
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetPcieReplayCounter": 3,
        }
        if name not in values:
            raise AttributeError(name)
        return self._of_the_first(values[name])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle != 0 or self.is_lost:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=100, used=60, free=40)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        has_it = handle == 0 and not self.is_lost
        returned = self.NVML_SUCCESS if has_it else self.NVML_ERROR_NOT_SUPPORTED
        value = SimpleNamespace(uiVal=self.memory_temperature)
        return [SimpleNamespace(nvmlReturn=returned, value=value)]

    def nvmlEventSetCreate(self) -> ctypes.c_int:
        return ctypes.c_int(7)

    def nvmlEventSetFree(self, events: object) -> None:
        self.freed.append(events)

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:
        assert kinds == self.nvmlEventTypeXidCriticalError
        self.listens_to.append(handle)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> SimpleNamespace:
        if not self.events:
            time.sleep(timeout_ms / 1000)
            raise self.NVMLError(self.NVML_ERROR_TIMEOUT)
        device, xid = self.events.pop(0)
        return SimpleNamespace(device=device, eventData=xid)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_a_gpu_tells_what_it_has_and_nothing_of_what_it_has_not(
    library: FakeNvml, clock: Clock
) -> None:
    with Sensors("here", clock) as sensors:
        found = sensors.read()
    assert (found.host, found.read_at) == ("here", clock.now)
    first, second = found.gpus
    assert first == GpuFigures(
        uuid="GPU-0",
        model="NVIDIA H200",
        sensors={
            "temp_core_celsius": 61,
            "temp_hbm_celsius": 88,
            "power_draw_watts": 312.5,
            "power_limit_watts": 700,
            "sm_clock_hertz": 1.98e9,
            "sm_clock_max_hertz": 1.985e9,
            "clocks_event_reasons": 4,
            "memory_used_bytes": 60,
            "memory_free_bytes": 40,
            "ecc_dbe_total": 0,
            "pcie_replay_total": 3,
        },
    )
    assert second == GpuFigures(uuid="GPU-1", model="A card", sensors={"temp_core_celsius": 61})
    assert {family.name for family in GPU} == {f"mlnode_gpu_{name}" for name in first.sensors}


def test_a_memory_temperature_of_zero_is_none(library: FakeNvml) -> None:
    library.memory_temperature = 0
    with Sensors("here") as sensors:
        assert "temp_hbm_celsius" not in sensors.read().gpus[0].sensors


def test_a_gpu_that_is_lost_keeps_its_place_and_says_nothing(library: FakeNvml) -> None:
    library.is_lost = True
    with Sensors("here") as sensors:
        lost, other = sensors.read().gpus
    assert lost == GpuFigures(uuid="here-0", model="", sensors={})
    assert other.uuid == "GPU-1"
    assert library.listens_to == [1]


def test_a_gpu_that_falls_off_the_bus_is_told_by_its_fault(library: FakeNvml) -> None:
    with Sensors("here") as sensors:
        library.is_lost = True
        library.events = [(0, 79)]
        sensors.wait_for_events(0.01)
        lost, _ = sensors.read().gpus
    assert lost == GpuFigures(uuid="GPU-0", model="NVIDIA H200", sensors={}, xid_events={79: 1})


def test_faults_are_counted_by_gpu_and_kind_for_as_long_as_it_listens(library: FakeNvml) -> None:
    with Sensors("here") as sensors:
        assert library.listens_to == [0, 1]
        library.events = [(0, 79), (1, 31), (0, 79)]
        assert sensors.wait_for_events(0.01)
        library.events = [(0, 31)]
        assert sensors.wait_for_events(0.01)
        assert [gpu.xid_events for gpu in sensors.read().gpus] == [{79: 2, 31: 1}, {31: 1}]
    assert (len(library.freed), library.n_open) == (1, 0)


def test_without_a_driver_there_are_no_gpus_and_nothing_to_wait_for(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise library.NVMLError(9)

    monkeypatch.setattr(library, "nvmlInit", no_driver)
    with Sensors("here") as sensors:
        assert not sensors.wait_for_events(60)
        assert sensors.read().gpus == ()


def test_the_machine_tells_of_cpu_memory_and_disk() -> None:
    found, cpu = machine_sensors(), cpu_times()
    assert cpu is not None
    assert 0 < cpu.busy < cpu.all
    assert 0 <= cpu.steal < cpu.all
    names = {f"mlnode_host_{name}" for name in found}
    assert names <= {family.name for family in HOST}
    assert found["memory_used_bytes"] > 0
    assert found["hf_cache_free_bytes"] > 0


def test_memory_without_a_limit_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.machine.sensors.container_memory", lambda: Memory(7, 0, None))
    assert "memory_limit_bytes" not in machine_sensors()
    monkeypatch.setattr("cli.machine.sensors.container_memory", lambda: Memory(7, 3, 9))
    found = machine_sensors()
    assert (found["memory_used_bytes"], found["memory_limit_bytes"]) == (7, 9)


class TestCgroup:
    """Version 2, else version 1, else the machine."""

    @pytest.fixture
    def own(self, tmp_path: Path) -> Path:
        return tmp_path / "own"

    @staticmethod
    def write(folder: Path, **files: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(text + "\n")

    def test_files_that_can_be_dropped_do_not_count(self, tmp_path: Path, own: Path) -> None:
        own.write_text("0::/pod/worker\n")
        folder = tmp_path / "pod/worker"
        self.write(
            folder, current=str(5 * GIB), max=str(8 * GIB), stat=f"anon 1\ninactive_file {3 * GIB}"
        )
        assert working_memory(tmp_path, own) == (2 * GIB, 8 * GIB)
        assert container_memory(tmp_path, own) == (5 * GIB, 3 * GIB, 8 * GIB)

    def test_a_container_sees_its_own_as_the_root(self, tmp_path: Path, own: Path) -> None:
        own.write_text("0::/somewhere/outside\n")
        self.write(tmp_path, current=str(GIB), max="max", stat="inactive_file 0")
        assert working_memory(tmp_path, own) == (GIB, psutil.virtual_memory().total)
        assert container_memory(tmp_path, own) == (GIB, 0, None)

    def test_version_1_has_other_names(self, tmp_path: Path, own: Path) -> None:
        own.write_text("4:cpu,memory:/job\n0::/\n")
        names = {
            "usage_in_bytes": str(GIB),
            "limit_in_bytes": str(2**63 - 4096),
            "stat": "total_inactive_file 24",
        }
        self.write(tmp_path / "memory/job", **names)
        assert working_memory(tmp_path, own) == (GIB - 24, psutil.virtual_memory().total)
        assert container_memory(tmp_path, own) == (GIB, 24, None)

    def test_without_any_it_is_the_machines(self, tmp_path: Path, own: Path) -> None:
        used, limit = working_memory(tmp_path, own)
        assert 0 < used < limit == psutil.virtual_memory().total
