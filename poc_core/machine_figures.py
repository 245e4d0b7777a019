"""Figures of a machine's GPUs and of itself, for monitoring."""

from pydantic import BaseModel

_GIB = 1024**3


class GpuFigures(BaseModel, frozen=True):
    """The figures of one GPU. A sensor that it has not got is not in `sensors`."""

    uuid: str
    model: str
    sensors: dict[str, float]  # name of api/node_metrics/families.py, without mlnode_gpu_ -> value
    xid_events: dict[int, int] = {}  # XID of the driver's -> how often since this host's start


class CpuTimes(BaseModel, frozen=True):
    """Seconds of all cores since the machine's start."""

    busy: float
    steal: float  # taken by other machines of the same host
    all: float  # the idle ones too


class MachineFigures(BaseModel, frozen=True):
    """The figures of one machine at one moment. `gpus` are in their order on the bus."""

    host: str  # its name
    read_at: float  # seconds since the epoch
    gpus: tuple[GpuFigures, ...] = ()
    sensors: dict[str, float] = {}  # the same names, without mlnode_host_
    cpu: CpuTimes | None = None


def is_short_of_memory(left: float, limit: float) -> bool:
    """True if so few bytes are left that the kernel may end an engine before anybody looks.

    Below 1 GiB (of a small machine a quarter), or below 5 % (of a large one 16 GiB).
    """
    return left < max(min(_GIB, limit / 4), min(limit / 20, 16 * _GIB))
