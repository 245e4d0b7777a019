"""Reads this machine's sensors: GPUs (with NVML), CPU, memory, and free disk space for models.

A sensor that does not exist is left out of the readings; it is never reported as 0.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from api.models.cache import ModelCache, free_bytes
from cli.machine.cgroup import container_memory
from poc_core.gpus import nvml
from poc_core.machine_figures import CpuTimes, GpuFigures, MachineFigures

Sensor = Callable[[Any, Any], float]  # (NVML, a device's handle) -> value


def _memory_temperature(library: Any, handle: Any) -> float:
    (field,) = library.nvmlDeviceGetFieldValues(handle, [library.NVML_FI_DEV_MEMORY_TEMP])
    if (
        field.nvmlReturn != library.NVML_SUCCESS or not field.value.uiVal
    ):  # some devices report 0 without a sensor
        raise library.NVMLError(library.NVML_ERROR_NOT_SUPPORTED)
    return float(field.value.uiVal)


def _double_bit_errors(library: Any, handle: Any) -> float:
    kind, since = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_AGGREGATE_ECC
    return float(library.nvmlDeviceGetTotalEccErrors(handle, kind, since))


# NVML reports milliwatts and megahertz.
_GPU: dict[str, Sensor] = {
    "temp_core_celsius": lambda nv, gpu: nv.nvmlDeviceGetTemperature(gpu, nv.NVML_TEMPERATURE_GPU),
    "temp_hbm_celsius": _memory_temperature,
    "power_draw_watts": lambda nv, gpu: nv.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "power_limit_watts": lambda nv, gpu: nv.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "sm_clock_hertz": lambda nv, gpu: nv.nvmlDeviceGetClockInfo(gpu, nv.NVML_CLOCK_SM) * 1e6,
    "sm_clock_max_hertz": lambda nv, gpu: nv.nvmlDeviceGetMaxClockInfo(gpu, nv.NVML_CLOCK_SM) * 1e6,
    "clocks_event_reasons": lambda nv, gpu: nv.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    "memory_used_bytes": lambda nv, gpu: nv.nvmlDeviceGetMemoryInfo(gpu).used,
    "memory_free_bytes": lambda nv, gpu: nv.nvmlDeviceGetMemoryInfo(gpu).free,
    "ecc_dbe_total": _double_bit_errors,
    "pcie_replay_total": lambda nv, gpu: nv.nvmlDeviceGetPcieReplayCounter(gpu),
}


class _Device(NamedTuple):
    """A GPU with the identity read at the start, which is reported even if the GPU fails later."""

    handle: Any  # None if the GPU was unavailable at the start
    uuid: str
    model: str


class Sensors:
    """A reader of this machine's sensors. Keeps NVML open to receive events. Not thread-safe."""

    def __init__(self, host: str, clock: Callable[[], float] = time.time) -> None:
        self._host = host
        self._clock = clock
        self._exits = contextlib.ExitStack()
        self._library: Any = None
        self._devices: list[_Device] = []
        self._events: Any = None
        self._xid_events: defaultdict[str, Counter[int]] = defaultdict(Counter)  # by UUID

    def __enter__(self) -> Sensors:
        self._library = nv = self._exits.enter_context(nvml())
        if nv is not None:
            count = nv.nvmlDeviceGetCount()
            self._devices = [_device(nv, index, self._host) for index in range(count)]
            self._listen(nv)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._exits.close()

    def wait_for_events(self, seconds: float) -> bool:
        """Counts driver errors (XID) for `seconds`. Returns False if NVML cannot report them."""
        if self._events is None:
            return False
        nv = self._library
        # By handle, because a lost device no longer reports its UUID.
        uuids = {
            bytes(device.handle): device.uuid
            for device in self._devices
            if device.handle is not None
        }
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            try:
                event = nv.nvmlEventSetWait_v2(self._events, max(1, int(left_s * 1000)))
            except nv.NVMLError as error:
                return bool(getattr(error, "value", None) == nv.NVML_ERROR_TIMEOUT)
            self._xid_events[uuids.get(bytes(event.device), "")][event.eventData] += 1
        return True

    def read(self) -> MachineFigures:
        gpus = tuple(self._read_gpu(device) for device in self._devices)
        return MachineFigures(
            host=self._host,
            read_at=self._clock(),
            gpus=gpus,
            sensors=machine_sensors(),
            cpu=cpu_times(),
        )

    def _listen(self, nv: Any) -> None:
        with contextlib.suppress(nv.NVMLError):
            events = nv.nvmlEventSetCreate()
            self._exits.callback(nv.nvmlEventSetFree, events)
            for device in self._devices:
                if device.handle is None:
                    continue
                # A device without events must not affect the others.
                with contextlib.suppress(nv.NVMLError):
                    kind = nv.nvmlEventTypeXidCriticalError
                    nv.nvmlDeviceRegisterEvents(device.handle, kind, events)
                    self._events = events

    def _read_gpu(self, device: _Device) -> GpuFigures:
        nv, sensors = self._library, {}
        for name, sensor in _GPU.items() if device.handle is not None else ():
            # Not every device, nor every release of the library, has every sensor.
            with contextlib.suppress(nv.NVMLError, AttributeError):
                sensors[name] = float(sensor(nv, device.handle))
        seen = dict(self._xid_events[device.uuid])
        return GpuFigures(uuid=device.uuid, model=device.model, sensors=sensors, xid_events=seen)


def _device(nv: Any, index: int, host: str) -> _Device:
    try:
        handle = nv.nvmlDeviceGetHandleByIndex(index)
        return _Device(handle, nv.nvmlDeviceGetUUID(handle), nv.nvmlDeviceGetName(handle))
    except nv.NVMLError:
        return _Device(None, f"{host}-{index}", "")


def cpu_times() -> CpuTimes | None:
    """Returns the CPU time of all cores since boot; None if this machine does not report it."""
    try:
        times = psutil.cpu_times()
        whole = sum(times) - times.guest - times.guest_nice  # user and nice include guest times
        idle = times.idle + times.iowait
    except (OSError, AttributeError):
        return None
    return CpuTimes(busy=whole - idle - times.steal, steal=times.steal, all=whole)


def machine_sensors() -> dict[str, float]:
    """Returns the readings of the memory and disk sensors by name, without those that fail."""
    sensors: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        memory = container_memory()
        sensors["memory_used_bytes"] = memory.used
        if memory.limit is not None:
            sensors["memory_limit_bytes"] = memory.limit
    with contextlib.suppress(OSError):
        sensors["hf_cache_free_bytes"] = free_bytes(ModelCache().path)
    return sensors
