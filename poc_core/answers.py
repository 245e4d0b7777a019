"""The API's answers as pydantic models, for OpenAPI (protocol.md, section 5)."""

from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, JsonValue, create_model

from poc_core.records import ModelInfo, RoundState
from poc_core.schemes.contract import contracts

Activity = Literal["IDLE", "GENERATING", "VALIDATING", "STOPPED"]


class Queued(BaseModel):
    """The answer for a stored job. GET /generate/{request_id} returns the job's progress."""

    status: Literal["queued"] = "queued"
    request_id: str
    queued_count: int = Field(description="Nonces of this job.")


class Progress(BaseModel):
    """The answer for a job without a result, which is queued, running, failed or cancelled."""

    status: Literal["queued", "running", "failed", "cancelled"]
    request_id: str
    model: str
    n_total: int = Field(description="Nonces of the job.")
    n_done: int = Field(description="Nonces computed so far.")
    created_at: float = Field(description="Seconds since the epoch, as the other times.")
    started_at: float | None = None
    finished_at: float | None = None
    error: str | None = Field(None, description="For a failed job: the reason, and what to do.")
    waiting_for: str | None = Field(
        None, description='"chat" while the job waits for chat requests.'
    )


class WorkerStats(BaseModel):
    total_processed: int
    nonces_per_second: float


class OutboxStats(BaseModel):
    bytes: int = Field(description="Bytes of Redis memory that undelivered callbacks use.")
    limit_bytes: int = Field(description="Bytes at which the round pauses (POC_OUTBOX_MAX_BYTES).")
    full: bool
    dropped: int = Field(description="Artifacts dropped after POC_CALLBACK_MAX_RETRIES tries.")
    failures: int = Field(description="Failed tries in a row.")
    next_try_at: float | None
    last_error: str | None


class SilentReceiver(BaseModel):
    receiver: str = Field(description="host:port.")
    failures: int = Field(description="Tries in a row without an answer.")
    next_try_at: float = Field(description="Time of the next try, of one callback.")


class Stats(BaseModel):
    """Figures of the latest round. Before the first round, only total_processed and
    nonces_per_second are set, for all jobs.
    """

    total_processed: int = Field(description="Nonces computed by all workers.")
    nonces_per_second: float = Field(
        description="Rate of all workers over the last 10 s, or since the round began."
    )
    nonces_per_second_of_round: float | None = Field(
        None, description="Mean rate since the round began."
    )
    elapsed_seconds: float | None = Field(
        None, description="Seconds from the round's start until now or its end."
    )
    n_excluded: int | None = Field(
        None, description="Number of nonces without a finite model output."
    )
    excluded_nonces: list[int] | None = Field(None, description="These nonces; the last 1,000.")
    workers: dict[str, WorkerStats] | None = None
    artifacts_delivered: int | None = Field(
        None, description="Artifacts (or valid nonces) that the receiver has accepted."
    )
    artifacts_waiting: int | None = Field(
        None, description="Artifacts (or valid nonces) that the receiver has not accepted yet."
    )
    outbox: OutboxStats | None = None
    exhausted: bool | None = Field(
        None,
        description="true: the round stopped because all nonces of its sequence were computed.",
    )
    error: str | None = Field(None, description="Why the round stopped by itself.")


class HealthReason(BaseModel):
    kind: Literal["redis", "deployment", "workers", "restarts", "host", "receiver", "courier"]
    level: Literal["degraded", "down"]
    text: str = Field(description="The problem in a sentence, with its duration.")
    what: str = Field(description="The first part of the sentence, without the duration.")
    more: str = Field(description="The part after the duration; may be empty.")
    since: float | None = Field(description="Start in seconds since the epoch, if known.")


class NodeHealth(BaseModel):
    """The node's health, as in /readyz, /status, up/status, the metrics and the console."""

    level: Literal["ok", "degraded", "down"] = Field(
        description="down: nothing is computed. degraded: the node works, but has a problem."
    )
    since: float | None = Field(
        description="Start of the level in seconds since the epoch, if known."
    )
    workers: int = Field(description="Number of workers that the node has or should have.")
    workers_ready: int
    reasons: list[HealthReason] = Field(
        description="The problems, the worst first; empty if there are none."
    )


class Seat(BaseModel):
    """A worker's place on its host, which outlives restarts of the worker process."""

    name: str = Field(description="Host and GPUs: host1/gpu0-1.")
    host: str
    model: str
    state: Literal["starting", "ready", "draining", "hung", "silent", "ended", "given up"]
    since: float | None = Field(
        description="Time at which the worker became ready or stopped being ready."
    )
    worker_id: str | None = Field(description="Id of the running worker in `workers`.")
    pid: int | None
    restarts: int
    restarts_lately: int = Field(description="Restarts within the last 10 minutes.")
    last_exit: str | None = Field(description="killed by SIGKILL, exit code 70, ...")
    last_exit_at: float | None


class Worker(BaseModel):
    id: str = Field(description="Id of this start of the worker.")
    name: str = Field("", description="Name of the worker across restarts: host1/gpu0-1.")
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
    # Older nodes may answer STOPPED.
    status: Activity = Field(description="Activity of the node; IDLE after the round has ended.")
    state: Activity = Field(description="State of the current round; IDLE before the first round.")
    config: dict[str, JsonValue] | None = Field(
        description="Body of the current round; null without a round."
    )
    stats: Stats
    queued_nonces: int = Field(description="Nonces of all jobs that are not computed yet.")
    callbacks_waiting: int = Field(
        description="Rounds and jobs with undelivered callbacks; a stopped round also while workers"
        " still compute for it."
    )
    silent_receivers: list[SilentReceiver] = Field(
        description="Receivers that did not answer several tries in a row; at most the latest 20."
    )
    workers: list[Worker]
    health: NodeHealth | None = None
    seats: list[Seat] = Field([], description="Workers across restarts, including missing workers.")
    version: str


# `Status` with the fields that some schemes add for their rounds.
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
    """Returns the union of pydantic models, to describe an OpenAPI answer with several forms."""
    return Union[models]  # noqa: UP007 - the number of models varies


class PowStatus(BaseModel):
    status: Activity


class RoundChanged(BaseModel):
    status: Literal["OK"] = "OK"
    pow_status: PowStatus


def round_changed(state: RoundState) -> RoundChanged:
    return RoundChanged(pow_status=PowStatus(status=state.value))


class Stopped(BaseModel):
    status: Literal["OK"] = "OK"
    pow_status: PowStatus = PowStatus(status="STOPPED")
    cancelled_jobs: int = Field(
        description="Number of cancelled jobs: queued ones with wait=false."
    )


class Cancelled(BaseModel):
    status: Literal["OK"] = "OK"
    cancelled: bool = Field(description="false: the job had already ended.")


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class EngineHealth(Health):
    reason: str | None = Field(
        None, description="Without a ready worker: why the node is still healthy."
    )


class Ready(BaseModel):
    status: Literal["ready"] = "ready"
    models: list[str] = Field(description="Models with a ready worker.")
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
    loaded_model: str = Field(
        description="The model as it was requested; empty while none is served."
    )
    poc_validation_inference: bool = Field(
        description="true: chat is served while proofs are computed."
    )


class HostStatus(BaseModel):
    id: str
    host: str
    state: Literal["idle", "stopping", "keeping", "starting", "serving", "failed"] = Field(
        description="State of the host. keeping: a stopped load continues for 120 s."
    )
    model: str | None = None
    workers: int = Field(description="Number of workers on the host.")
    ready: int = Field(description="Number of these workers that are ready.")
    error: str | None = None
    left_out: list[str] = Field(
        default=[], description="Arguments that the host's vLLM does not support, with the reason."
    )
    follows: str = Field(
        "", description="HOST:PORT of the head, if the host is part of another host's engine."
    )


StartupStatus = Literal["not_started", "in_progress", "completed", "failed", "cancelled"]


class UpStatus(BaseModel):
    is_running: bool
    status: Literal["idle", "starting", "running", "failed"]
    startup_status: StartupStatus | None = Field(
        None, description="The status by MLNode's names. cancelled: stopped while loading."
    )
    elapsed_seconds: float | None = Field(
        description="Seconds from the request until now, or until the model served or failed."
    )
    error: str | None = Field(description="Why the deployment failed.")
    model: str | None = Field(description="The deployed model.")
    left_out: list[str] = Field(
        default=[], description="Arguments that no engine gets, with the reason."
    )
    hosts: list[HostStatus]
    is_starting: bool
    models: list[str] = Field(description="Models with a ready worker.")
    workers_running: int
    workers_starting: int
    health: NodeHealth | None = None


class Versions(BaseModel):
    version: str
    vllm_version: str | None = Field(
        description="vLLM's version on the hosts; several if they differ, null without a host."
    )
    poc_validation_inference: bool


class Problem(BaseModel):
    loc: list[str | int] = Field(description="Path of the field in the body.")
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
    """The state of a host's invitation. `redis`: HOST:PORT of Redis, to which the host connects."""

    name: str
    state: Literal["invited", "expired", "joined", "revoked"]
    redis: str
