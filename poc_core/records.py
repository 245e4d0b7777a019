"""The records that API, workers and commands share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import BaseModel, JsonValue

from poc_core.fields import MAX_NONCE
from poc_core.serving.openai_paths import USUAL
from poc_core.serving.places import name_of


class ProofSpec(BaseModel, frozen=True):
    """The inputs of a proof. Together with a nonce, they determine the nonce's value."""

    scheme: str = "artifact"
    block_hash: str
    public_key: str
    seq_len: int
    options: dict[str, JsonValue] = {}  # inputs that only this scheme has (Contract.options)


class Passes(NamedTuple):
    """The forward passes of a nonce: one pass over `rows` positions, then `steps` passes over one
    position each.
    """

    rows: int
    steps: int = 0

    @property
    def positions(self) -> int:
        return self.rows + self.steps


class PassOrder(NamedTuple):
    """The forward passes of a micro-batch of `n` nonces, numbered from 0. The first passes compute
    the `shape.rows` positions of at most `part` nonces each. Each further pass is a step, which
    computes one position of all nonces.
    """

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
        """Returns the indices of the nonces that pass number `step` computes."""
        if self.is_step(step):
            return range(self.n)
        return range(step * self.part, min((step + 1) * self.part, self.n))

    def positions(self, step: int) -> range:
        """Returns the positions that pass number `step` computes for each of its nonces."""
        rows, t = self.shape.rows, step - self.n_parts
        return range(rows) if t < 0 else range(rows + t, rows + t + 1)

    def n_tokens(self, step: int) -> int:
        return len(self.members(step)) * len(self.positions(step))

    def is_step(self, step: int) -> bool:
        """Returns True if forward pass `step` is a decode step, which computes one position of each
        nonce.
        """
        return step >= self.n_parts

    def is_last(self, step: int) -> bool:
        return step == self.n_passes - 1

    def has_points_after(self, step: int) -> bool:
        """Returns True if the pass after number `step` is a step, which needs earlier results."""
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
    """The fields of a client's request that a job stores for its answer and its callback.

    The proof spec and the nonces are stored separately.
    """

    block_height: int
    node_id: int
    node_count: int
    url: str | None = None
    terms: dict[str, JsonValue] = {}  # the criteria for claims (Contract.terms)


@dataclass(frozen=True)
class NewJob:
    """A job to store, made from a checked request. A job with `claimed` values is a validation."""

    model: str
    spec: ProofSpec
    request: JobRequest
    nonces: Sequence[int]
    batch_size: int
    claimed: Mapping[int, JsonValue] | None = None  # nonce -> value
    inline: bool = False  # True if the client waits for the answer
    client: str = ""  # the client whose limit of waiting callbacks includes this job

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
    """A job and its progress. Times are seconds since the epoch."""

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
    unavailable: bool = False  # this node lacked values for a verdict; another node may have them
    waiting_for: str | None = None  # "chat" if chat requests delay the job's batches


class RoundState(StrEnum):
    """The states of a round (protocol.md, section 5, States). IDLE: stored, but not started."""

    IDLE = "IDLE"
    GENERATING = "GENERATING"
    VALIDATING = "VALIDATING"
    STOPPED = "STOPPED"

    @property
    def activity(self) -> "RoundState":
        """The node's activity during a round in this state: IDLE if STOPPED, else the state."""
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
    batch_size: int  # from the client; the node chooses its micro-batches itself
    url: str | None = None
    terms: dict[str, JsonValue] = {}  # criteria for reported nonces and claims (Contract.terms)

    @property
    def nonces(self) -> range:
        """The nonces of this node and group, in order (protocol.md, section 4). The range may be
        too long for `len`.
        """
        first = self.node_id + self.group_id * self.node_count
        return range(first, MAX_NONCE + 1, self.n_groups * self.node_count)


@dataclass(frozen=True)
class RoundRecord:
    """A round and its progress. Times are seconds since the epoch."""

    round_id: str
    state: RoundState
    config: RoundConfig
    created_at: float
    started_at: float | None = None  # when generation first began
    stopped_at: float | None = None
    n_processed: int = 0  # computed nonces, including excluded ones
    n_valid: int = 0  # nonces reported
    n_excluded: int = 0  # nonces without a finite state
    error: str | None = None  # why the round stopped by itself
    is_exhausted: bool = False  # stopped because all nonces of its sequence are computed


class Refusal(StrEnum):
    """The reason why a worker gets no lease although there is work."""

    ROUND = "round"  # another round is generating than the round for which the worker asked
    # The round's outbox is at its limit, or the worker asked for 0 nonces. It may ask again later.
    FULL = "full"
    EXHAUSTED = "exhausted"  # all nonces are leased; the round ends with the last lease


@dataclass(frozen=True)
class Lease:
    """Nonces of a job or round that belong to one worker until it completes or returns them."""

    owner_id: str  # id of the job or round
    # In a job: the index of the batch. In a round: the index of the first nonce in its sequence.
    place: int
    model: str
    spec: ProofSpec
    nonces: Sequence[int]
    number: int = 0  # the number of the lease request, which heartbeats list (HeldLeases)
    terms: Mapping[str, JsonValue] = field(default_factory=dict)  # only rounds: RoundConfig.terms
    of_round: bool = False
    urgent: bool = False  # True for a validation, which has a deadline
    alone: bool = False  # True if a worker or engine was lost on it, so it is computed alone


# Most nonces of one micro-batch. vLLM's kernels for linear attention use sequences x heads (at most
# 64, in GLM-5.3-Flash) as the second dimension of a CUDA grid, whose limit is 65,535.
_MOST_NONCES = 65_535 // 64


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model and its limits."""

    name: str  # as clients request it
    hidden_size: int
    n_layers: int
    max_seq_len: int  # tokens of one nonce
    max_batch_tokens: int  # tokens of one micro-batch
    dtype: str  # "float32" or "bfloat16"
    max_sequences: int = 1 << 20  # sequences that the engine runs at once
    layers: str = ""  # module path of the decoder layers; empty: the engine has none
    layers_reflected: bool = True  # False: proofs do not reflect, like the network's nodes
    # Caches for proofs: "private" to each layer, or "shared" by layers not active together.
    caches: str = ""

    # Scheme-specific limits with this model, by scheme (Contract.common).
    schemes: Mapping[str, Mapping[str, JsonValue]] = field(default_factory=dict)

    def max_batch(self, rows: int) -> int:
        """Returns how many nonces of `rows` tokens each fit into one forward; at least 1."""
        return max(1, min(self.max_batch_tokens // rows, self.max_sequences, _MOST_NONCES))


# In a chat answer: the worker's engine was lost, so another worker may answer the request. "0" if
# the engine was lost before the request came.
ENGINE_LOST_HEADER = "x-proofline-engine-lost"

# In a chat request: proves to the worker that the request comes from an API of its own node.
GATEWAY_SECRET_HEADER = "x-proofline-gateway-secret"

# In a chat request: identifies the client, because a worker shares its server fairly by client.
GATEWAY_CLIENT_HEADER = "x-proofline-client"

# In a chat request: the cache_salt of its client, for paths that have no field for one in some
# releases of vLLM, such as /v1/messages.
GATEWAY_SALT_HEADER = "x-proofline-cache-salt"


# Seconds between two signs of life of a worker process, and seconds without a sign after which the
# worker is silent: a death is noticed within two seconds, and a sign or two may come late.
PULSE_S = 0.4
SILENT_S = 1.3


@dataclass(frozen=True)
class WorkerRecord:
    """A worker's description in its heartbeats. Each start of the worker has a new `id`."""

    id: str
    model: str  # as clients request it
    engine: str  # "vllm", "transformers" or "synthetic"
    host: str
    pid: int
    state: Literal["starting", "ready", "draining", "hung"]
    started_at: float  # seconds since the epoch
    info: ModelInfo | None = None  # unknown until the engine has loaded the model
    port: int | None = None  # port of its OpenAI server, if it has one
    chat_host: str | None = None  # host by which the API reaches the OpenAI server
    chat_paths: tuple[str, ...] = USUAL  # paths that the API forwards to it, see openai_paths
    stats: Mapping[str, int | float] = field(default_factory=dict)
    # The secret that its OpenAI server requires, generated at each start.
    chat_secret: str | None = field(default=None, repr=False)
    # The GPUs of its machine, as MachineGpus (poc_core/gpus.py).
    gpus: Mapping[str, JsonValue] = field(default_factory=dict)
    visible_gpus: str = ""  # CUDA_VISIBLE_DEVICES of its process; empty: all of the machine's
    # The machine's or container's host name, by which local processes recognise their workers.
    machine: str = ""
    host_id: str = ""  # HostReport.id of its supervisor; empty without one

    @property
    def name(self) -> str:
        """The worker's name, such as host1/gpu0-1, which stays the same after restarts."""
        return name_of(self.id)

    @property
    def is_ready(self) -> bool:
        """True if the worker takes new work."""
        return self.state == "ready"
