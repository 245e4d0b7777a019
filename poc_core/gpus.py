"""Reads this machine's GPUs from NVIDIA's management library (NVML), without torch."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from pydantic import BaseModel

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
# Seconds for which a reading is cached, because NVML takes milliseconds per GPU.
_FRESH_S = 10.0
# Seconds for which `now` waits for a reading on another thread.
_PATIENCE_S = 1.0


class Gpu(BaseModel):
    """A GPU. Fields that the driver does not report are null."""

    index: int  # in PCI bus order
    uuid: str = ""
    host: str = ""
    name: str = ""
    total_memory_mb: int | None = None
    free_memory_mb: int | None = None
    used_memory_mb: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    is_available: bool = True
    error_message: str | None = None


class GpuDriver(BaseModel):
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    nvml_version: str | None = None


class MachineGpus(BaseModel):
    """The GPUs and the driver of one machine. Without a driver, `devices` is empty."""

    devices: list[Gpu] = []
    driver: GpuDriver | None = None


@contextlib.contextmanager
def nvml() -> Iterator[ModuleType | None]:
    """Opens NVIDIA's management library (pynvml). Yields None if it is missing or fails."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, or one that does not answer
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


class GpuWatch:
    """A reader of this machine's GPUs. It reads the GPUs again after _FRESH_S seconds."""

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._read_at = float("-inf")
        self.latest = MachineGpus()  # as last read; reading them can hang with the driver
        self._failed = False
        self._one_reads = threading.Lock()  # a driver that hangs must not hold further threads

    def now(self) -> MachineGpus:
        """Returns the GPUs as read at most _FRESH_S seconds ago; no GPUs if the driver fails.

        While the driver hangs, one call does not return; all others return the last reading.
        """
        if self._is_old() and self._one_reads.acquire(timeout=_PATIENCE_S):
            try:
                if self._is_old():
                    self._read()
            finally:
                self._one_reads.release()
        return self.latest

    def _is_old(self) -> bool:
        return self._clock() - self._read_at > _FRESH_S

    def _read(self) -> None:
        try:
            self.latest = read(self._host)
        except Exception as error:
            self.latest = MachineGpus()
            if not self._failed:
                logger.warning("NVML fails, so the GPUs are not reported: %r", error)
            self._failed = True
        else:
            self._failed = False
        self._read_at = self._clock()


def read(host: str) -> MachineGpus:
    with nvml() as library:
        if library is None:
            return MachineGpus()
        devices = [_device(library, index, host) for index in range(library.nvmlDeviceGetCount())]
        return MachineGpus(devices=devices, driver=_driver(library))


def _device(library: Any, index: int, host: str) -> Gpu:
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        return Gpu(
            index=index,
            uuid=library.nvmlDeviceGetUUID(handle),
            host=host,
            name=library.nvmlDeviceGetName(handle),
            total_memory_mb=memory.total // _MIB,
            free_memory_mb=memory.free // _MIB,
            used_memory_mb=memory.used // _MIB,
            utilization_percent=_optional(
                library, lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu
            ),
            temperature_c=_optional(
                library,
                lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU),
            ),
        )
    except library.NVMLError as error:  # a GPU that fell off the bus must not hide the others
        uuid = f"{host}-{index}"
        return Gpu(index=index, uuid=uuid, host=host, is_available=False, error_message=str(error))


def _optional(library: Any, ask: Callable[[], int]) -> int | None:
    """Returns the result of `ask`; None if NVML does not support that query here."""
    try:
        return int(ask())
    except library.NVMLError:
        return None


def _driver(library: Any) -> GpuDriver:
    cuda = _optional(library, library.nvmlSystemGetCudaDriverVersion)  # None without libcuda
    return GpuDriver(
        driver_version=library.nvmlSystemGetDriverVersion(),
        cuda_driver_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        nvml_version=library.nvmlSystemGetNVMLVersion(),
    )
