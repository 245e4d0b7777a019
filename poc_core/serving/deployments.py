"""Records of a node's deployment, and of the progress of its hosts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel

from poc_core.serving.model_options import ModelOptions
from poc_core.serving.places import WorkerPlace

# Seconds for which hosts continue to load engines after their deployment was withdrawn. The network
# node stops a load that takes more than 15 minutes, and then requests the same deployment again.
KEPT_S = 120.0


class Deployment(ModelOptions):
    """The model that a node must serve, with its options."""

    # Requested arguments that no engine gets, each with the reason.
    left_out: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The model as requested. For a directory, the name by which clients request the model."""
        return self.name if self.is_directory else self.model


class DeploymentState(StrEnum):
    """The state of a deployment in `inference/up/status` (protocol.md, section 5)."""

    IDLE = "idle"  # nothing is deployed
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"


class HostState(StrEnum):
    """The state of a host that follows a deployment."""

    IDLE = "IDLE"  # nothing is deployed and nothing runs
    STOPPING = "STOPPING"  # workers of another deployment are ending
    KEEPING = "KEEPING"  # engines of a withdrawn deployment continue to load, for KEPT_S
    STARTING = "STARTING"
    SERVING = "SERVING"  # all workers were ready; single workers may be restarting
    FAILED = "FAILED"


class HostReport(BaseModel, frozen=True):
    """A host's report on its progress with the deployment that it follows."""

    id: str
    host: str  # the host's name
    state: HostState
    generation: int  # of the deployment that the host follows
    model: str | None = None  # the served name of the running model
    workers: int = 0
    ready: int = 0  # number of ready workers
    error: str | None = None
    vllm_version: str | None = None
    left_out: tuple[str, ...] = ()  # arguments that the host's vLLM lacks, each with the reason
    engine: str = ""  # the workers' engine
    follows: str = ""  # HOST:PORT of the head if the host is part of another host's engine
    engine_at: str = ""  # HOST:PORT of the head, also on the head; empty for engines on one host
    places: tuple[WorkerPlace, ...] = ()  # the workers with their restarts
    # Free bytes and the limit of the host's or its container's memory; None if unknown.
    memory: tuple[int, int] | None = None


class ChildLog(BaseModel, frozen=True):
    """The last log lines of a supervised process, including lines from before its restarts."""

    name: str  # as in the log of `up` or `workers`: host1/gpu0
    pid: int | None  # None if the process is not running
    lines: list[str]


class HostLogs(BaseModel, frozen=True):
    """The last log lines of a host's workers."""

    host: str  # the host's name
    workers: list[ChildLog]


@dataclass(frozen=True)
class DeploymentRecord:
    """A node's deployment as stored in Redis. Times are seconds since the epoch."""

    generation: int  # grows with every change
    wanted: Deployment | None  # None if nothing should run
    by: Literal["start", "request"]  # source: a host's --model at its start, or a request
    asked_at: float
    settled_at: float | None = None  # when the deployment first served, or failed
    error: str | None = None  # why the deployment failed
    restored_at: float | None = None  # when a host restored the record that Redis had lost
    engines: int = 0  # the generation that started the engines; lower if engines were kept
    cancelled: bool = False  # withdrawn while loading


@dataclass(frozen=True)
class DeploymentStatus:
    """A node's deployment and the reports of its live hosts."""

    record: DeploymentRecord | None  # None if nothing was ever deployed
    hosts: Sequence[HostReport] = ()

    @property
    def wanted(self) -> Deployment | None:
        return None if self.record is None else self.record.wanted

    @property
    def state(self) -> DeploymentState:
        record = self.record
        if record is not None and record.error is not None:
            return DeploymentState.FAILED
        if record is None or record.wanted is None:
            return DeploymentState.IDLE
        serving = [host for host in self.following if host.state is HostState.SERVING]
        served = any(host.model == record.wanted.name for host in serving)
        return DeploymentState.RUNNING if served else DeploymentState.STARTING

    @property
    def following(self) -> list[HostReport]:
        """The hosts that follow the current deployment, not an earlier one."""
        generation = self.record.generation if self.record else 0
        return [host for host in self.hosts if host.generation >= generation]

    @property
    def vllm_versions(self) -> str:
        """The releases of vLLM on live hosts, such as "0.28.0, 0.32.1"; empty if unknown."""
        return ", ".join(sorted({host.vllm_version for host in self.hosts if host.vllm_version}))

    @property
    def is_gone(self) -> bool:
        """True if all hosts follow the current deployment, and none runs a model."""
        return all(
            host in self.following and host.state in (HostState.IDLE, HostState.KEEPING)
            for host in self.hosts
        )
