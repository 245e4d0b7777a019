"""The deployment of a node, and its hosts' progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel

from poc_core.serving.model_options import ModelOptions
from poc_core.serving.places import WorkerPlace

# Seconds for which hosts keep engines that were loading when they were withdrawn. The network node
# stops a load of more than 15 minutes and then asks for the very same.
KEPT_S = 120.0


class Deployment(ModelOptions):
    """A model that the node shall serve."""

    # Arguments that somebody asked for and no engine is given, each with the reason.
    left_out: tuple[str, ...] = ()

    @property
    def asked(self) -> str:
        """The model as it was asked for; a directory, which only hosts know, by its name."""
        return self.name if self.is_directory else self.model


class DeploymentState(StrEnum):
    """The deployment's state as `inference/up/status` tells it (protocol.md, section 5)."""

    IDLE = "idle"  # nothing shall run
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"


class HostState(StrEnum):
    """A host's state for the deployment that it follows."""

    IDLE = "IDLE"  # nothing runs, as nothing shall
    STOPPING = "STOPPING"  # workers of another deployment end
    KEEPING = "KEEPING"  # engines go on loading though withdrawn, for KEPT_S
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
    left_out: tuple[str, ...] = ()  # arguments that its vLLM does not know, each with the reason
    engine: str = ""  # of its workers
    follows: str = ""  # HOST:PORT of the head, where it is a part of another host's engine
    engine_at: str = ""  # the same of every host of an engine over several, the head too
    places: tuple[WorkerPlace, ...] = ()  # they, over their restarts
    # bytes of its memory, or its container's, that are left, and the limit; None: unknown
    memory: tuple[int, int] | None = None


class ChildLog(BaseModel, frozen=True):
    """The last lines that a supervised process wrote, over its restarts."""

    name: str  # as in the log of `up` or `workers`: host1/gpu0
    pid: int | None  # None: it does not run now
    lines: list[str]


class HostLogs(BaseModel, frozen=True):
    """The logs of a host's workers."""

    host: str  # its name
    workers: list[ChildLog]


@dataclass(frozen=True)
class DeploymentRecord:
    """The stored deployment. Times are seconds since the epoch."""

    generation: int  # grows with every change
    wanted: Deployment | None  # None: nothing
    by: Literal["start", "request"]  # a host's --model at its start, or a request since
    asked_at: float
    settled_at: float | None = None  # when it first served, or failed
    error: str | None = None  # why it failed
    restored_at: float | None = None  # when a host brought back the record that Redis had lost
    engines: int = 0  # the generation that started the engines; an earlier one: they were kept
    cancelled: bool = False  # withdrawn while it was loading


@dataclass(frozen=True)
class DeploymentStatus:
    """The record, and how far the hosts that live are with it."""

    record: DeploymentRecord | None  # None: nothing was ever deployed
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
        """The hosts that have seen the record as it is now."""
        generation = self.record.generation if self.record else 0
        return [host for host in self.hosts if host.generation >= generation]

    @property
    def vllm_versions(self) -> str:
        """The releases of vLLM on the hosts that live, as "0.28.0, 0.32.1"; empty: none told."""
        return ", ".join(sorted({host.vllm_version for host in self.hosts if host.vllm_version}))

    @property
    def is_gone(self) -> bool:
        """True if every host knows that nothing shall run, and has ended what did, or keeps it."""
        return all(
            host in self.following and host.state in (HostState.IDLE, HostState.KEEPING)
            for host in self.hosts
        )
