"""The API's answers for OpenAPI (protocol.md, section 5). Results are sent without parsing them."""

from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, JsonValue, create_model

from poc_core.records import ModelInfo, RoundState
from poc_core.schemes import contracts


class Queued(BaseModel):
    """The job is stored; GET /generate/{request_id} returns its progress."""

    status: Literal["queued"] = "queued"
    request_id: str
    queued_count: int = Field(description="Nonces of this job.")


class Progress(BaseModel):
    """A job without a result: queued, running, failed or cancelled."""

    status: Literal["queued", "running", "failed", "cancelled"]
    request_id: str
    model: str
    n_total: int = Field(description="Nonces of the job.")
    n_done: int = Field(description="Of these, computed so far.")
    created_at: float = Field(description="Seconds since the epoch, as the other times.")
    started_at: float | None = None
    finished_at: float | None = None
    error: str | None = Field(None, description="Of a failed job: why, and what to do.")
    waiting_for: str | None = Field(
        None, description='"chat" while chat requests keep the engine from the job.'
    )


class WorkerStats(BaseModel):
    total_processed: int
    nonces_per_second: float


class OutboxStats(BaseModel):
    bytes: int = Field(description="Of Redis' memory, that what waits takes.")
    limit_bytes: int = Field(
        description="Of these, at most (POC_OUTBOX_MAX_BYTES); at it the round pauses."
    )
    full: bool
    dropped: int = Field(
        description="Artifacts given up after POC_CALLBACK_MAX_RETRIES; 0 unless that is set."
    )
    failures: int = Field(description="Tries in a row that failed.")
    next_try_at: float | None
    last_error: str | None


class SilentReceiver(BaseModel):
    receiver: str = Field(description="host:port.")
    failures: int = Field(description="Tries in a row without any answer.")
    next_try_at: float = Field(
        description="Until then no job's callback is sent there, and then one at a time."
    )


class Stats(BaseModel):
    """Figures of the latest round. Before the first round, the first two cover all jobs."""

    total_processed: int = Field(description="Nonces computed by all workers.")
    nonces_per_second: float = Field(
        description="Mean of the last 10 s, or since a younger round began; all workers."
    )
    nonces_per_second_of_round: float | None = Field(
        None, description="Mean since the round began."
    )
    elapsed_seconds: float | None = Field(
        None, description="Since the round began, until it stopped."
    )
    n_excluded: int | None = Field(
        None, description="Nonces for which the model gave no finite state."
    )
    excluded_nonces: list[int] | None = Field(
        None, description="These nonces; of very many the last ones."
    )
    workers: dict[str, WorkerStats] | None = None
    artifacts_delivered: int | None = Field(
        None, description="Artifacts (or valid nonces) the receiver has."
    )
    artifacts_waiting: int | None = Field(
        None, description="Artifacts (or valid nonces) it still has to be sent."
    )
    outbox: OutboxStats | None = None
    exhausted: bool | None = Field(
        None,
        description="Whether the round stopped because all nonces of its sequence are computed.",
    )
    error: str | None = Field(None, description="Why the round stopped by itself.")


class HealthReason(BaseModel):
    kind: Literal["redis", "deployment", "workers", "restarts", "host", "receiver", "courier"]
    level: Literal["degraded", "down"]
    text: str = Field(description="The trouble in a sentence, with how long it lasts.")
    what: str = Field(description="Its first part, without the time.")
    more: str = Field(description="What follows the time; may be empty.")
    since: float | None = Field(description="Seconds since the epoch, where it is known.")


class NodeHealth(BaseModel):
    """The node's health, equal in /readyz, /status, up/status, the metrics and the console."""

    level: Literal["ok", "degraded", "down"] = Field(
        description="down: it computes nothing for anybody; degraded: something of it does not."
    )
    since: float | None = Field(description="As far as is known.")
    workers: int = Field(description="That the node has or should have.")
    workers_ready: int
    reasons: list[HealthReason] = Field(description="The worst first; none where all is well.")


class Seat(BaseModel):
    """A worker's place on its host, which outlives restarts of the worker process."""

    name: str = Field(description="Of the host and its slot: host1/gpu0-1.")
    host: str
    model: str
    state: Literal["starting", "ready", "draining", "hung", "silent", "ended", "given up"]
    since: float | None = Field(description="When it got ready, or ceased to be.")
    worker_id: str | None = Field(description="Of the start that lives; in `workers`.")
    pid: int | None
    restarts: int
    restarts_lately: int = Field(description="Of these, within 10 minutes.")
    last_exit: str | None = Field(description="killed by SIGKILL, exit code 70, ...")
    last_exit_at: float | None


class Worker(BaseModel):
    id: str = Field(description="Of this start.")
    name: str = Field("", description="Over its restarts: host1/gpu0-1.")
    model: str
    engine: str
    state: Literal["starting", "ready", "draining", "hung"]
    host: str
    pid: int
    port: int | None = None
    started_at: float
    info: ModelInfo | None = None
    stats: dict[str, JsonValue] = {}


class Status(BaseModel):
    status: Literal["IDLE", "GENERATING", "VALIDATING", "STOPPED"] = Field(
        description="What the node does; IDLE once the round has ended."  # STOPPED: of older nodes
    )
    state: Literal["IDLE", "GENERATING", "VALIDATING", "STOPPED"] = Field(
        description="Of the round stored last; IDLE before the first."
    )
    config: dict[str, JsonValue] | None = Field(
        description="Of the round that runs; null without one."
    )
    stats: Stats
    queued_nonces: int = Field(description="Nonces accepted and not yet computed, over all jobs.")
    callbacks_waiting: int = Field(
        description="Rounds and jobs, also past ones, whose receiver lacks something; a stopped"
        " round also while workers still compute some of it."
    )
    silent_receivers: list[SilentReceiver] = Field(
        description="Receivers that did not answer for some tries in a row; of many the latest."
    )
    workers: list[Worker]
    health: NodeHealth | None = None
    seats: list[Seat] = Field([], description="Workers over their restarts, also those away.")
    version: str


# `Status` plus the fields that some schemes add for their rounds.
STATUS: Any = create_model(
    "Status",
    __base__=(
        *(contract.status_fields for contract in reversed(contracts()) if contract.status_fields),
        Status,
    ),
)

# The answers for completed jobs, of all schemes.
RESULTS = [model for contract in contracts() for model in contract.result_models]


def one_of(*models: type[BaseModel]) -> Any:
    """Returns the union of these models, for an OpenAPI answer."""
    return Union[models]  # noqa: UP007 - the number of models varies


class PowStatus(BaseModel):
    status: Literal["IDLE", "GENERATING", "VALIDATING", "STOPPED"]


class RoundChanged(BaseModel):
    status: Literal["OK"] = "OK"
    pow_status: PowStatus


def round_changed(state: RoundState) -> RoundChanged:
    return RoundChanged(pow_status=PowStatus(status=state.value))


class Stopped(BaseModel):
    status: Literal["OK"] = "OK"
    pow_status: PowStatus = PowStatus(status="STOPPED")
    cancelled_jobs: int = Field(
        description="Jobs that waited in the queue with wait=false and are cancelled now."
    )


class Cancelled(BaseModel):
    status: Literal["OK"] = "OK"
    cancelled: bool = Field(description="false: it had ended before.")


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class EngineHealth(Health):
    reason: str | None = Field(
        None, description="Where no worker is ready: why the node has not failed all the same."
    )


class Ready(BaseModel):
    status: Literal["ready"] = "ready"
    models: list[str] = Field(description="Models with a worker that is ready.")
    health: NodeHealth | None = None


class NotReady(BaseModel):
    detail: str
    health: NodeHealth | None = None


class Done(BaseModel):
    status: Literal["OK"] = "OK"


class NodeState(BaseModel):
    state: Literal["INFERENCE", "STOPPED"]
    version: str
    poc_status: Literal["IDLE", "GENERATING", "VALIDATING"]
    inference_healthy: bool = Field(description="A worker of the deployed model is ready.")
    loaded_model: str = Field(description="As it was asked for; empty while none is served.")
    poc_validation_inference: bool = Field(description="Chat is served while proofs are computed.")


class HostStatus(BaseModel):
    id: str
    host: str
    state: Literal["idle", "stopping", "keeping", "starting", "serving", "failed"] = Field(
        description="keeping: what was stopped while it was loading goes on for 120 s."
    )
    model: str | None = None
    workers: int = Field(description="Workers that the host runs.")
    ready: int = Field(description="Of these, ready.")
    error: str | None = None
    left_out: list[str] = Field(
        default=[], description="Arguments that the host's vLLM does not know, with the reason."
    )
    follows: str = Field(
        "", description="HOST:PORT of the head, where it is a part of another host's engine."
    )


StartupStatus = Literal["not_started", "in_progress", "completed", "failed", "cancelled"]


class UpStatus(BaseModel):
    is_running: bool
    status: Literal["idle", "starting", "running", "failed"]
    startup_status: StartupStatus | None = Field(
        None, description="The same in MLNode's words; cancelled: stopped while it was loading."
    )
    elapsed_seconds: float | None = Field(
        description="From the request until now, or until it served or failed."
    )
    error: str | None = Field(description="Why it failed.")
    model: str | None = Field(description="What is deployed.")
    left_out: list[str] = Field(
        default=[], description="Arguments that no engine is given, with the reason."
    )
    hosts: list[HostStatus]
    is_starting: bool
    models: list[str] = Field(description="Models with a worker that is ready.")
    workers_running: int
    workers_starting: int
    health: NodeHealth | None = None


class Versions(BaseModel):
    version: str
    vllm_version: str | None = Field(
        description="Of the hosts; several where they differ, null without a host."
    )
    poc_validation_inference: bool


class Problem(BaseModel):
    loc: list[str | int] = Field(description="Where in the body.")
    msg: str
    type: str


class Malformed(BaseModel):
    detail: list[Problem]


class Mismatch(BaseModel):
    model_config = ConfigDict(title="ParamsMismatch")

    error: str
    message: str
    fields: list[str] = []
    requested: dict[str, JsonValue] = {}
    deployed: dict[str, JsonValue] = {}


class Conflict(BaseModel):
    detail: Mismatch


class Refused(BaseModel):
    detail: str | dict[str, JsonValue]


class HostStanding(BaseModel):
    """The state of a host's invitation. `redis`: HOST:PORT to which the host connects."""

    name: str
    state: Literal["invited", "expired", "joined", "revoked"]
    redis: str
