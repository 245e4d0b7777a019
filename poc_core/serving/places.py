"""The names of workers. A worker's name is its host and slot, and stays the same after restarts."""

import re

from pydantic import BaseModel

# A supervisor sets these for each worker: its slot without a GPU, and the HostReport.id.
SLOT_VARIABLE = "PROOFLINE_SLOT"
HOST_ID_VARIABLE = "PROOFLINE_HOST_ID"

_OF_ONE_START = re.compile(r"-[0-9a-f]{6}$")  # the part of an id after the name
_UUID = re.compile(r"^(?:GPU|MIG)-([0-9a-f]{8})[0-9a-f-]*$", re.IGNORECASE)


def slot_of(visible_gpus: str, otherwise: str) -> str:
    """Returns a worker's slot, such as gpu0-1 for the GPUs "0,1"; `otherwise` without GPUs."""
    gpus = [part.strip() for part in visible_gpus.split(",") if part.strip()]
    short = [_UUID.sub(r"\1", gpu) for gpu in gpus]
    return re.sub(r"[^\w-]+", "-", f"gpu{'-'.join(short)}") if gpus else otherwise


def name_of(worker_id: str) -> str:
    """Returns the name of the worker with this id: host1/gpu0-1 for host1/gpu0-1-3fa9c1."""
    return _OF_ONE_START.sub("", worker_id)


class WorkerPlace(BaseModel, frozen=True):
    """A supervisor's record of one worker and its restarts. Times are seconds since the epoch."""

    name: str  # host1/gpu0-1
    pid: int | None  # None if the worker is not running
    is_ready: bool
    gave_up: str | None = None  # why the supervisor stopped restarting the worker
    since: float  # when it became ready; if it is not: when it was last ready or first started
    restarts: int = 0
    restarts_lately: int = 0  # restarts within LATELY_S
    last_exit: str | None = None  # "killed by SIGKILL", "exit code 70"
    last_exit_at: float | None = None


# Seconds in which many restarts count as a problem.
LATELY_S = 600.0
