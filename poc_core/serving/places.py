"""A worker's place: a slot of a host, with a name that is equal over restarts."""

import re

from pydantic import BaseModel

# What a supervisor tells each worker by its environment: its slot, where that is no GPU, and the id
# under which the supervisor reports.
SLOT_VARIABLE = "PROOFLINE_SLOT"
HOST_ID_VARIABLE = "PROOFLINE_HOST_ID"

_OF_ONE_START = re.compile(r"-[0-9a-f]{6}$")  # what an id has beyond the name
_UUID = re.compile(r"^(?:GPU|MIG)-([0-9a-f]{8})[0-9a-f-]*$", re.IGNORECASE)


def slot_of(visible_gpus: str, otherwise: str) -> str:
    """The slot of a worker by its CUDA_VISIBLE_DEVICES: gpu0-1 for "0,1"; else `otherwise`."""
    gpus = [part.strip() for part in visible_gpus.split(",") if part.strip()]
    short = [_UUID.sub(r"\1", gpu) for gpu in gpus]
    return re.sub(r"[^\w-]+", "-", f"gpu{'-'.join(short)}") if gpus else otherwise


def name_of(worker_id: str) -> str:
    """The name of a worker, host1/gpu0-1, in the id of one of its starts, host1/gpu0-1-3fa9c1."""
    return _OF_ONE_START.sub("", worker_id)


class WorkerPlace(BaseModel, frozen=True):
    """A worker as its supervisor sees it, over its restarts. Times: seconds since the epoch."""

    name: str  # host1/gpu0-1
    pid: int | None  # None: it does not run now
    is_ready: bool
    gave_up: str | None = None  # why it is not restarted any more
    since: float  # when it got ready, or else when it was started first or was ready last
    restarts: int = 0
    restarts_lately: int = 0  # of these, within LATELY_S
    last_exit: str | None = None  # "killed by SIGKILL", "exit code 70"
    last_exit_at: float | None = None


# Seconds within which many restarts are a trouble of their own.
LATELY_S = 600.0
