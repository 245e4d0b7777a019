"""What a node shall run, and how far its hosts are with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Literal

from pydantic import BaseModel


class Deployment(BaseModel, frozen=True):
    """A model, and how `vllm serve` would be told to serve it. None: as each host has it."""

    model: str  # a name on the Hugging Face hub, a shipped model's, or a directory on every host
    served_model_name: str | None = None
    dtype: str | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    max_batch_tokens: int | None = None
    vllm_args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What clients call the model; of a directory, if nothing else was said, its last part."""
        return self.served_model_name or (
            PurePath(self.model).name if self._is_directory else self.model
        )

    @property
    def asked(self) -> str:
        """The model as it was asked for; a directory, which only hosts know, by its name."""
        return self.name if self._is_directory else self.model

    @property
    def _is_directory(self) -> bool:
        return self.model.startswith(("/", ".", "~"))


class DeploymentState(StrEnum):
    """As `inference/up/status` tells it (protocol.md, section 5)."""

    IDLE = "idle"  # nothing shall run
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"


class HostState(StrEnum):
    """What a host does for the deployment that it follows."""

    IDLE = "IDLE"  # nothing runs, as nothing shall
    STOPPING = "STOPPING"  # workers of another deployment end
    STARTING = "STARTING"
    SERVING = "SERVING"  # it did get ready; single workers may be restarting
    FAILED = "FAILED"


class HostReport(BaseModel, frozen=True):
    """How far a host is, as it says itself."""

    id: str
    host: str  # its name
    state: HostState
    generation: int  # of the deployment that it follows
    model: str | None = None  # what clients call the one it runs
    workers: int = 0
    ready: int = 0  # of these workers
    error: str | None = None
    vllm_version: str | None = None


class ChildLog(BaseModel, frozen=True):
    """The last lines that a supervised process wrote, over its restarts."""

    name: str  # as in the log of `up` or `workers`: worker-0
    pid: int | None  # None: it does not run now
    lines: list[str]


class HostLogs(BaseModel, frozen=True):
    """Those of a host's workers."""

    host: str  # its name
    workers: list[ChildLog]


@dataclass(frozen=True)
class DeploymentRecord:
    """What the node shall run. Times are seconds since the epoch."""

    generation: int  # grows with every change
    wanted: Deployment | None  # None: nothing
    by: Literal[
        "start", "request"
    ]  # a host's own --model at its start, or somebody's request since
    asked_at: float
    settled_at: float | None = None  # when it first served, or failed
    error: str | None = None  # why it failed


@dataclass(frozen=True)
class DeploymentStatus:
    """The record and what the hosts that live have made of it."""

    record: DeploymentRecord | None  # None: nothing was ever deployed
    hosts: Sequence[HostReport] = ()

    @property
    def wanted(self) -> Deployment | None:
        return None if self.record is None else self.record.wanted

    @property
    def state(self) -> DeploymentState:
        record = self.record
        if record is None or record.wanted is None:
            return DeploymentState.IDLE
        if record.error is not None:
            return DeploymentState.FAILED
        serving = [host for host in self.following if host.state is HostState.SERVING]
        served = any(host.model == record.wanted.name for host in serving)
        return DeploymentState.RUNNING if served else DeploymentState.STARTING

    @property
    def following(self) -> list[HostReport]:
        """The hosts that have seen the record as it is now."""
        generation = self.record.generation if self.record else 0
        return [host for host in self.hosts if host.generation >= generation]

    @property
    def is_gone(self) -> bool:
        """Whether every host knows that nothing shall run, and has ended what did."""
        return all(host in self.following and host.state is HostState.IDLE for host in self.hosts)
