"""Jobs, workers and requests as tests need them."""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import JsonValue

from poc_core.records import (
    JobRequest,
    Lease,
    ModelInfo,
    NewJob,
    ProofSpec,
    Refusal,
    RoundConfig,
    RoundRecord,
    WorkerRecord,
)
from poc_core.state import keys
from poc_core.state.client import Store
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from poc_core.state.rounds import RoundStore
from poc_core.state.work import WorkStore

T = TypeVar("T")

MODEL = "tiny-qwen3"
K_DIM = 12
SPEC = ProofSpec(
    block_hash="block",
    public_key="key",
    seq_len=64,
    options={"k_dim": K_DIM, "stronger_rng": False},
)
OTHER_SPEC = SPEC.model_copy(update={"block_hash": "other"})
DISTANCE_SPEC = ProofSpec(
    scheme="distance",
    block_hash="block",
    public_key="key",
    seq_len=64,
    options={"randomization": "sign_flips"},
)
REQUEST = JobRequest(block_height=7, node_id=0, node_count=1)


class Clock:
    """Seconds since the epoch, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class RecordingDispatcher:
    """Writes down whom it is to wake: how many workers of a model, and which."""

    def __init__(self) -> None:
        self.woken: list[tuple[str, int]] = []
        self.each: list[str] = []

    def wake(self, model: str, most: int) -> None:
        self.woken.append((model, most))

    def wake_each(self, model: str, worker_ids: list[str]) -> None:
        self.each += worker_ids

    def close(self) -> None:
        pass


def new_job(
    nonces: list[int],
    batch_size: int = 2,
    claimed: dict[int, str] | None = None,
    model: str = MODEL,
) -> NewJob:
    return NewJob(model, SPEC, REQUEST, nonces, batch_size, claimed)


def result_body(jobs: JobStore, job_id: str) -> bytes | None:
    """The whole answer of a completed job."""
    answer = jobs.result(job_id)
    return None if answer is None else b"".join(answer.pieces)


def due_now(outbox: Outbox) -> list[str]:
    """The ids of outboxes that are due, as a courier hears of them: each once."""
    return [due.outbox_id for due in outbox.announce()]


def round_config(**changes: Any) -> RoundConfig:
    common = {
        "model": MODEL,
        "spec": SPEC,
        "block_height": 7,
        "node_id": 0,
        "node_count": 1,
        "batch_size": 4,
    }
    return RoundConfig(**common | {"url": "http://receiver:9000/poc"} | changes)


def worker_record(
    worker_id: str = "w1",
    model: str = MODEL,
    state: Literal["starting", "ready", "draining", "hung"] = "ready",
    hidden_size: int = 128,
    max_seq_len: int = 1024,
    max_batch_tokens: int = 8192,
) -> WorkerRecord:
    info = ModelInfo(model, hidden_size, 4, max_seq_len, max_batch_tokens, "float32")
    return WorkerRecord(
        worker_id, model, "synthetic", "here", 1, state, 1.0, info if state == "ready" else None
    )


def status_answer(models: list[str]) -> dict[str, Any]:
    """What GET /status answers without a round, with a ready worker of each model."""
    about = {"engine": "synthetic", "state": "ready", "host": "here", "pid": 1, "started_at": 1.0}
    return {
        "status": "IDLE",
        "state": "IDLE",
        "config": None,
        "stats": {"total_processed": 30, "nonces_per_second": 0.0},
        "queued_nonces": 0,
        "callbacks_waiting": 0,
        "silent_receivers": [],
        "workers": [
            {"id": f"w{number}", "model": model, **about} for number, model in enumerate(models, 1)
        ],
        "version": "0.2.0",
    }


def body(**changes: Any) -> dict[str, Any]:
    """A right body for POST /generate, with changes; those to `params` are merged."""
    params = {"model": MODEL, "seq_len": 64, "k_dim": K_DIM} | changes.pop("params", {})
    return {
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "node_id": 0,
        "node_count": 1,
        "nonces": [0, 1, 2],
        "params": params,
    } | changes


def round_body(**changes: Any) -> dict[str, Any]:
    """A right artifact body for POST /init/generate, with changes; those to `params` are merged."""
    sent = body(**changes)
    if "nonces" not in changes:
        del sent["nonces"]
    return sent


def distance_body(**changes: Any) -> dict[str, Any]:
    """A right body of the earlier generation for POST /init and the like, with changes."""
    return {
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "r_target": 1.405,
        "node_id": 0,
        "node_count": 1,
        "seq_len": 64,
    } | changes


def known(found: T | None) -> T:
    """What is looked for, which is there."""
    assert found is not None
    return found


def leased(found: Lease | Refusal | None) -> Lease:
    """What `lease_batch` or `lease_nonces` gave, which is a lease."""
    assert isinstance(found, Lease), found
    return found


def work_of(store: Store, worker_id: str = "w1") -> WorkStore:
    """The same Redis as a worker sees it."""
    return WorkStore(store._redis, store._settings, worker_id, store._clock)  # noqa: SLF001


def lease_batch(
    jobs: JobStore, job_id: str, batch: int, worker_id: str, work: WorkStore | None = None
) -> Lease | None:
    """Leases a batch out of its turn, if nobody has it."""
    redis: Any = jobs._redis  # noqa: SLF001
    model = redis.hget(keys.job(job_id), "model")
    if model is None or batch not in pending(jobs, job_id):
        return None
    line = keys.line(model.decode())
    score = redis.zscore(line, job_id)
    redis.zadd(line, {job_id: -1e12})
    redis.zadd(keys.job(job_id) + ":free", {str(batch): -1})
    redis.expire(keys.job(job_id) + ":free", 1000)
    try:
        found = (work or work_of(jobs, worker_id)).lease(model.decode())
    finally:
        if score is not None:
            redis.zadd(line, {job_id: score}, xx=True)
        redis.zrem(keys.job(job_id) + ":free", batch)
    if isinstance(found, Refusal) or not found:
        return None
    assert (found[0].owner_id, found[0].place) == (job_id, batch)
    return found[0]


def complete_batch(jobs: JobStore, job_id: str, batch: int, values: Sequence[JsonValue]) -> bool:
    """Completes a batch by the worker that leased it."""
    redis: Any = jobs._redis  # noqa: SLF001
    held = redis.hget(f"{keys.job(job_id)}:leases", batch) or b"w1"
    return work_of(jobs, held.decode().split("|")[0]).complete(_batch(job_id, batch), values)


def release_batch(
    jobs: JobStore, job_id: str, batch: int, worker_id: str, lost_engine: bool = False
) -> bool:
    return work_of(jobs, worker_id).release(_batch(job_id, batch), lost_engine)


def free_lost(jobs: JobStore, model: str = MODEL) -> int:
    """Frees the leases of the model's jobs that do not hold; how many."""
    return sum(found.n_freed for found in work_of(jobs).stuck(model))


def lease_nonces(
    rounds: RoundStore, record: RoundRecord, worker_id: str, places: int
) -> Lease | Refusal | None:
    """None: the round does not generate."""
    work = work_of(rounds, worker_id)
    found = work.lease(record.config.model, round=record, places=places)
    return found if isinstance(found, Refusal) else found[0] if found else None


def complete_lease(
    rounds: RoundStore, lease: Lease, worker_id: str, values: Sequence[JsonValue]
) -> bool:
    return work_of(rounds, worker_id).complete(lease, values)


def _batch(job_id: str, batch: int) -> Lease:
    return Lease(job_id, batch, MODEL, SPEC, [])


def pending(jobs: JobStore, job_id: str) -> list[int]:
    """The batches that are neither done nor leased, lowest first."""
    redis: Any = jobs._redis  # noqa: SLF001
    todo, leased = (
        redis.smembers(f"{keys.job(job_id)}:todo"),
        redis.hkeys(f"{keys.job(job_id)}:leases"),
    )
    return sorted(int(index) for index in set(todo).difference(leased))
