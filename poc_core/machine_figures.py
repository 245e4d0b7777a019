"""Measurements of a machine and its GPUs, for monitoring."""

from pydantic import BaseModel

_GIB = 1024**3


class GpuFigures(BaseModel, frozen=True):
    """Measurements of one GPU. `sensors` lacks the sensors that the GPU does not have."""

    uuid: str
    model: str
    sensors: dict[str, float]  # name of api/node_metrics/families.py, without mlnode_gpu_ -> value
    xid_events: dict[int, int] = {}  # the driver's XID -> occurrences since this host's start


class CpuTimes(BaseModel, frozen=True):
    """CPU seconds since the machine's start, summed over all cores."""

    busy: float
    steal: float  # taken by other virtual machines of the same host
    all: float  # including idle seconds


class MachineFigures(BaseModel, frozen=True):
    """Measurements of one machine at one moment. `gpus` are in PCI bus order."""

    host: str  # its name
    read_at: float  # seconds since the epoch
    gpus: tuple[GpuFigures, ...] = ()
    sensors: dict[str, float] = {}  # name as in GpuFigures, without mlnode_host_ -> value
    cpu: CpuTimes | None = None


def is_short_of_memory(left: float, limit: float) -> bool:
    """Returns True if so few of `limit` bytes are left that the kernel may soon kill an engine:
    less than min(1 GiB, a quarter of the limit), or less than min(16 GiB, a 20th of the limit).
    """
    return left < max(min(_GIB, limit / 4), min(limit / 20, 16 * _GIB))
