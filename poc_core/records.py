"""The records that API, workers and command share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import BaseModel, JsonValue

from poc_core.arithmetic.nonces import NonceSequence
from poc_core.serving.openai_paths import USUAL
from poc_core.serving.places import name_of


class ProofSpec(BaseModel, frozen=True):
    """Everything besides the nonces that determines the numbers of a proof."""

    scheme: str = "artifact"
    block_hash: str
    public_key: str
    seq_len: int
    options: dict[str, JsonValue] = {}  # the scheme's own (Contract.options)


class Passes(NamedTuple):
    """The engine's work per nonce: a forward of `rows` positions, then `steps` of one each."""

    rows: int
    steps: int = 0

    @property
    def positions(self) -> int:
        return self.rows + self.steps


class PassOrder(NamedTuple):
    """The numbered passes of a micro-batch of `n` nonces: forwards of `part` nonces, then steps."""

    n: int
    part: int
    shape: Passes

    @property
    def n_parts(self) -> int:
        return -(-self.n // self.part)

    @property
    def n_passes(self) -> int:
        return self.n_parts + self.shape.steps

    def members(self, step: int) -> range:
        """Places of the nonces that a pass computes."""
        return (
            range(step * self.part, min((step + 1) * self.part, self.n))
            if step < self.n_parts
            else range(self.n)
        )

    def positions(self, step: int) -> range:
        """The positions of each nonce that a pass computes."""
        rows, t = self.shape.rows, step - self.n_parts
        return range(rows) if t < 0 else range(rows + t, rows + t + 1)

    def n_tokens(self, step: int) -> int:
        return len(self.members(step)) * len(self.positions(step))

    def is_step(self, step: int) -> bool:
        """True if a pass is one position of every nonce."""
        return step >= self.n_parts

    def is_last(self, step: int) -> bool:
        return step == self.n_passes - 1

    def has_points_after(self, step: int) -> bool:
        """True if a step, which needs this pass's points, follows."""
        return self.n_parts - 1 <= step < self.n_passes - 1


class JobStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (JobStatus.QUEUED, JobStatus.RUNNING)


class JobKind(StrEnum):
    GENERATE = "generate"
    VALIDATE = "validate"


class JobRequest(BaseModel, frozen=True):
    """A job's request, as far as its answer and callback need it besides spec and nonces."""

    block_height: int
    node_id: int
    node_count: int
    url: str | None = None
    terms: dict[str, JsonValue] = {}  # by what claims are judged (Contract.terms)


@dataclass(frozen=True)
class NewJob:
    """A checked request, ready to be stored; with `claimed` (nonce -> value) a validation."""

    model: str
    spec: ProofSpec
    request: JobRequest
    nonces: Sequence[int]
    batch_size: int
    claimed: Mapping[int, JsonValue] | None = None
    inline: bool = False  # its client waits for the answer
    client: str = ""  # whose share of the outbox its callback takes

    @property
    def kind(self) -> JobKind:
        return JobKind.GENERATE if self.claimed is None else JobKind.VALIDATE

    @property
    def n_batches(self) -> int:
        return math.ceil(len(self.nonces) / self.batch_size)

    def batch(self, index: int) -> Sequence[int]:
        return self.nonces[index * self.batch_size : (index + 1) * self.batch_size]


@dataclass(frozen=True)
class JobRecord:
    """A job as it stands. Times are seconds since the epoch."""

    job_id: str
    status: JobStatus
    kind: JobKind
    model: str
    spec: ProofSpec
    request: JobRequest
    n_total: int
    n_done: int
    n_batches: int
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    error: str | None = None
    unavailable: bool = False  # this node's numbers were missing: another node may be asked
    waiting_for: str | None = None  # what keeps the job's batches from running: "chat"


class RoundState(StrEnum):
    """The states of a round (protocol.md, section 5, States). IDLE: stored by /init only."""

    IDLE = "IDLE"
    GENERATING = "GENERATING"
    VALIDATING = "VALIDATING"
    STOPPED = "STOPPED"

    @property
    def activity(self) -> "RoundState":
        """Returns the node's activity in this state; for the network an ended round is none."""
        return RoundState.IDLE if self is RoundState.STOPPED else self


class RoundConfig(BaseModel, frozen=True):
    """A round's configuration, checked before it is stored."""

    model: str
    spec: ProofSpec
    block_height: int
    node_id: int
    node_count: int
    group_id: int = 0
    n_groups: int = 1
    batch_size: int  # as the client counts; micro-batches are the node's own business
    url: str | None = None
    terms: dict[str, JsonValue] = {}  # how nonces are reported and claims judged (Contract.terms)

    @property
    def nonces(self) -> NonceSequence:
        return NonceSequence(self.node_id, self.node_count, self.group_id, self.n_groups)


@dataclass(frozen=True)
class RoundRecord:
    """A round as it stands. Times are seconds since the epoch."""

    round_id: str
    state: RoundState
    config: RoundConfig
    created_at: float
    started_at: float | None = None  # of the first generation
    stopped_at: float | None = None
    n_processed: int = 0  # nonces computed, the excluded among them
    n_valid: int = 0  # nonces reported
    n_excluded: int = 0  # nonces without a finite state
    error: str | None = None  # why it stopped by itself
    is_exhausted: bool = False  # it stopped because all nonces of its sequence are computed


class Refusal(StrEnum):
    """Why a worker is leased nothing of a round."""

    STOPPED = "stopped"  # or it validates, or expired
    FULL = "full"  # the outbox is at its limit: ask again later
    EXHAUSTED = "exhausted"  # the sequence has ended; the round does with the last of its leases


@dataclass(frozen=True)
class Lease:
    """Nonces of a job or a round that one worker computes next, then completes or releases."""

    owner_id: str  # of the job or the round
    place: int  # of a job: which batch; of a round: of the first nonce in its sequence
    model: str
    spec: ProofSpec
    nonces: Sequence[int]
    terms: Mapping[str, JsonValue] = field(default_factory=dict)  # of a round: RoundConfig.terms
    urgent: bool = False  # of a validation, which has a deadline
    name: str = ""  # of a job's, by which its worker's heartbeats tell of it; see Hand
    of_round: bool = False
    alone: bool = False  # a worker or engine was lost on it: nothing else is computed with it


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model and its limits."""

    name: str  # as clients request it
    hidden_size: int
    n_layers: int
    max_seq_len: int  # tokens of one nonce
    max_batch_tokens: int  # of one micro-batch
    dtype: str  # "float32" or "bfloat16"
    max_sequences: int = 1 << 20  # of one micro-batch
    layers: str = ""  # where the engine found the decoder layers; empty: it has none
    layers_reflected: bool = True  # False: proofs leave them alone, as the network's nodes do
    # of proofs: "shared" by layers that never need one at the same time, or "private" to each
    caches: str = ""

    # Limits of schemes' own with this model, by scheme, as Contract.common reads them.
    schemes: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict)

    def max_batch(self, rows: int) -> int:
        """Nonces that one forward of `rows` tokens each holds; at least one."""
        return max(1, min(self.max_batch_tokens // rows, self.max_sequences))


# In a chat answer: the worker's engine is gone, so another worker may answer the request. "0": it
# was gone before the request came.
ENGINE_LOST_HEADER = "x-proofline-engine-lost"

# In a chat request: shows the worker that the request comes from an API of its own node.
GATEWAY_SECRET_HEADER = "x-proofline-gateway-secret"

# In a chat request: tells a worker clients apart, whose shares of its server it keeps.
GATEWAY_CLIENT_HEADER = "x-proofline-client"

# In a chat request: the cache_salt of its client, for paths that have no field for one in some
# releases of vLLM, such as /v1/messages.
GATEWAY_SALT_HEADER = "x-proofline-cache-salt"


# Seconds between two signs of life of a worker's process, and without one until it is silent:
# a death shows within two seconds, and a sign or two may come late.
PULSE_S = 0.4
SILENT_S = 1.3


@dataclass(frozen=True)
class WorkerRecord:
    """One worker process, by its heartbeat. Each has its own `id`, which its leases name."""

    id: str
    model: str  # as clients request it
    engine: str  # "vllm", "transformers" or "synthetic"
    host: str
    pid: int
    state: Literal["starting", "ready", "draining", "hung"]
    started_at: float  # seconds since the epoch
    info: ModelInfo | None = None  # unknown until the engine has loaded the model
    port: int | None = None  # of its OpenAI server, where it has one
    chat_host: str | None = None  # by which the API reaches that server
    chat_paths: tuple[str, ...] = USUAL  # what of that server the API passes on, see openai_paths
    stats: Mapping[str, int | float] = field(default_factory=dict)
    # made at its start; what its OpenAI server wants
    chat_secret: str | None = field(default=None, repr=False)
    # of its machine: MachineGpus of poc_core/gpus.py
    gpus: Mapping[str, JsonValue] = field(default_factory=dict)
    visible_gpus: str = ""  # CUDA_VISIBLE_DEVICES of its process; empty: all of its machine
    # the machine's or container's own name, by which its other processes know their workers
    machine: str = ""
    host_id: str = ""  # of the supervisor that started it (HostReport.id); empty: none did

    @property
    def name(self) -> str:
        """Returns the worker's name for people, equal over restarts: host1/gpu0-1."""
        return name_of(self.id)

    @property
    def is_ready(self) -> bool:
        """True if the worker takes new work: not while it loads, drains or its engine hangs."""
        return self.state == "ready"
