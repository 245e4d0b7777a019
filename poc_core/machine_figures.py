"""What a machine of the node tells of its GPUs and of itself, for monitoring."""

from pydantic import BaseModel


class GpuFigures(BaseModel, frozen=True):
    """The figures of one GPU. A sensor that it has not got is not in `sensors`."""

    uuid: str
    model: str
    sensors: dict[str, float]  # name of api/node_metrics/families.py, without mlnode_gpu_ -> value
    xid_events: dict[int, int] = {}  # XID of the driver's -> how often since this host's start


class MachineFigures(BaseModel, frozen=True):
    """The figures of one machine at one moment. `gpus` are in their order on the bus."""

    host: str  # its name
    read_at: float  # seconds since the epoch
    gpus: tuple[GpuFigures, ...] = ()
    sensors: dict[str, float] = {}  # the same names, without mlnode_
