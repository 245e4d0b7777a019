"""Jobs in Redis against a model of them: leases, completions, losses and ends in any order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import fakeredis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poc_core.records import JobStatus, Lease, NewJob, Refusal
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.work import MAX_LOSSES, WorkStore
from tests.harness.fuzz import FUZZ
from tests.harness.samples import (
    MODEL,
    OTHER_SPEC,
    REQUEST,
    SPEC,
    Clock,
    pending,
    result_body,
    worker_record,
)

PICK = st.integers(0, 1000)  # of a list, modulo its length
FIRST, EITHER = st.integers(0, 2**63 - 10), st.booleans()
AFTER_LEASE = st.sampled_from(["nothing", "complete", "complete"])
# An event happens the more often, the more often it is named.
EVENTS = [
    *["a worker starts", "a worker dies", "some time passes", "much time passes", "the round ends"]
    * 3,
    *["a heart beats"] * 3,
    *["a round begins", "a job is cancelled", "a job fails", "what is queued is cancelled"],
]


@dataclass
class Named:
    """What a lease's name says."""

    worker: str
    number: int


@dataclass
class Worker:
    """Its store, and what its last heartbeat told of its leases."""

    store: WorkStore
    n_asked: int = 0
    held: dict[int, int] = field(default_factory=dict)  # leases by number
    n_told: int = 0
    told: set[int] = field(default_factory=set)


@dataclass
class Job:
    """What is known of a job, apart from Redis."""

    new: NewJob
    at: float  # its place in the line: when it was created, and 0.1 s later for each nonce
    status: JobStatus = JobStatus.QUEUED
    todo: set[int] = field(default_factory=set)
    leases: dict[int, Named] = field(default_factory=dict)
    came_back: set[int] = field(default_factory=set)  # batches whose leases ended
    lost: dict[int, set[str]] = field(default_factory=dict)  # by batch, workers that it cost

    @property
    def is_active(self) -> bool:
        return not self.status.is_final

    @property
    def n_left(self) -> int:
        return sum(len(self.new.batch(index)) for index in self.todo)

    @property
    def in_line(self) -> list[int]:
        """The batches to lease, in their order."""
        free = self.todo - self.leases.keys() if self.is_active else set()
        return sorted(free, key=lambda index: (index not in self.came_back, index))

    def end_lease(self, index: int) -> None:
        del self.leases[index]
        self.came_back.add(index)

    def lose(self, index: int, worker: str) -> bool:
        """A worker died or lost its engine on a batch. True when the job failed of it."""
        self.lost.setdefault(index, set()).add(worker)
        if len(self.lost[index]) >= MAX_LOSSES:
            self.status = JobStatus.FAILED
        return not self.is_active


def values_of(lease: Lease) -> list[str | None]:
    """Every fifth nonce is excluded."""
    name = lease.spec.block_hash
    return [None if nonce % 5 == 4 else f"{name}:{nonce}" for nonce in lease.nonces]


class JobMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.redis = fakeredis.FakeRedis()
        self.clock, self.settings = Clock(), Settings()
        self.store = JobStore(self.redis, self.settings, self.clock)
        self.registry = WorkerRegistry(self.redis, self.settings, self.clock)
        self.jobs: dict[str, Job] = {}
        self.in_hand: list[tuple[str, Lease]] = []  # workers and what they were granted, ever
        self.alive: dict[str, Worker] = {}
        self.stores: dict[str, WorkStore] = {}  # also of the dead
        self.n_workers = 0
        self.start_worker()

    def teardown(self) -> None:
        if hasattr(self, "redis"):
            self.finish_everything()
            self.redis.close()

    # Clients.

    @precondition(lambda self: len(self.active()) < 3)  # few, so that much happens to each
    @rule(
        n=st.integers(1, 7), batch_size=st.integers(1, 3), first=FIRST, spec=EITHER, inline=EITHER
    )
    def create(self, n: int, batch_size: int, first: int, spec: bool, inline: bool) -> None:
        nonces, proof = list(range(first, first + n)), SPEC if spec else OTHER_SPEC
        new = NewJob(MODEL, proof, REQUEST, nonces, batch_size, inline=inline)
        at = self.clock.now + 0.1 * n
        self.jobs[self.store.create(new)] = Job(new, at, todo=set(range(new.n_batches)))
        self.clock.now += 0.001  # so that the order of jobs is known

    # What happens to the node.

    @rule(event=st.sampled_from(EVENTS), pick=PICK)
    def something_happens(self, event: str, pick: int) -> None:
        match event:
            case "a worker starts" if len(self.alive) < 3:
                self.start_worker()
            case "a worker dies" if self.alive:
                name = self.a_worker(pick)
                del self.alive[name]
                self.registry.remove(name)
            case "a heart beats" if self.alive:
                self.beat(self.a_worker(pick))
            case "some time passes":
                self.clock.now += 100
            case "much time passes":
                self.clock.now += 200
            case "a round begins":
                self.redis.set(keys.generating(MODEL), "round", ex=1000)
            case "the round ends":
                self.redis.delete(keys.generating(MODEL))
            case "a job is cancelled" | "a job fails" if self.jobs:
                self.end(pick, fails=event == "a job fails")
            case "what is queued is cancelled":
                self.cancel_queued()

    def start_worker(self) -> None:
        self.n_workers += 1
        name = f"w{self.n_workers}"
        self.stores[name] = WorkStore(self.redis, self.settings, name, self.clock)
        self.alive[name] = Worker(self.stores[name])
        self.beat(name)

    def beat(self, name: str) -> None:
        worker = self.alive[name]
        worker.n_told, worker.told = worker.n_asked, set(worker.held)
        self.registry.heartbeat(worker_record(name), worker.store.hand.summary())

    def a_worker(self, pick: int) -> str:
        return list(self.alive)[pick % len(self.alive)]

    def end(self, pick: int, fails: bool) -> None:
        job_id, job = self.job(pick)
        ended = self.store.fail(job_id, "why") if fails else self.store.cancel(job_id)
        assert ended == job.is_active
        if ended:
            job.status = JobStatus.FAILED if fails else JobStatus.CANCELLED

    def cancel_queued(self) -> None:
        waiting = [job for job in self.jobs.values() if job.status is JobStatus.QUEUED]
        queued = [job for job in waiting if not job.new.inline]
        assert self.store.cancel_queued() == len(queued)
        for job in queued:
            job.status = JobStatus.CANCELLED

    # Workers.

    @precondition(lambda self: self.jobs and self.alive)
    @rule(worker=PICK, room=st.sampled_from([0, 0, 2, 9]), then=AFTER_LEASE)
    def lease(self, worker: int, room: int, then: str) -> None:
        worker_id = self.a_worker(worker)
        asks = self.alive[worker_id]
        asks.n_asked += 1
        named = Named(worker_id, asks.n_asked)
        a_round_generates = self.a_round_generates
        expected = self.expected_next(named)
        found = asks.store.lease(MODEL)
        if expected is None:
            assert found == (Refusal.ROUND if a_round_generates else [])
            return
        job_id, index = expected
        job = self.jobs[job_id]
        assert isinstance(found, list)
        (first,) = found
        assert (first.owner_id, first.place, first.spec) == (job_id, index, job.new.spec)
        assert (first.nonces, first.alone) == (job.new.batch(index), index in job.lost)
        asks.held[first.number] = 1
        if room > 0 and not first.alone:
            asks.n_asked += 1
        more = self.expected_more(first, Named(worker_id, asks.n_asked), room)
        granted = asks.store.lease_more(first, room)
        assert [(lease.owner_id, lease.place) for lease in granted] == more
        for lease in granted:
            assert lease.nonces == self.jobs[lease.owner_id].new.batch(lease.place)
            asks.held[lease.number] = asks.held.get(lease.number, 0) + 1
        self.in_hand += [(worker_id, lease) for lease in (first, *granted)]
        if then == "complete":
            self.complete(self.in_hand.index((worker_id, first)), keeps=True)

    @precondition(lambda self: self.in_hand)
    @rule(pick=PICK, keeps=st.booleans())
    def complete(self, pick: int, keeps: bool) -> None:
        """Also by a worker that was taken for dead, that died since, or that does it twice."""
        worker, lease = self.hand(pick, keeps)
        job = self.jobs[lease.owner_id]
        if job.is_active and lease.place in job.todo:
            job.todo.discard(lease.place)
            job.leases.pop(lease.place, None)
            job.lost.pop(lease.place, None)
        is_last = self.stores[worker].complete(lease, values_of(lease))
        assert is_last == (job.is_active and not job.todo)

    @precondition(lambda self: self.in_hand)
    @rule(pick=PICK, keeps=st.booleans(), lost_engine=st.booleans())
    def release(self, pick: int, keeps: bool, lost_engine: bool) -> None:
        worker, lease = self.hand(pick, keeps)
        job, index = self.jobs[lease.owner_id], lease.place
        expected = job.is_active and index in job.leases and job.leases[index].worker == worker
        if expected:
            job.end_lease(index)
            expected = not (lost_engine and job.lose(index, worker))
        assert self.stores[worker].release(lease, lost_engine) == expected

    @rule(pick=PICK, beats=st.booleans())
    def forget(self, pick: int, beats: bool) -> None:
        """A worker has a lease not in hand any more, and Redis does not know: it forgot, or it
        was away.
        """
        all_leases = (lease for job in self.jobs.values() for lease in job.leases.values())
        leases = [lease for lease in all_leases if lease.worker in self.alive]
        if leases:
            lease = leases[pick % len(leases)]
            worker = self.alive[lease.worker]
            for _ in range(worker.held.pop(lease.number, 0)):
                worker.store.hand.drop(lease.number)
            if beats:
                self.beat(lease.worker)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        job_id, job = self.job(pick)
        expected = job.is_active and not job.todo
        assert self.store.finish(job_id) == expected
        if expected:
            job.status = JobStatus.COMPLETED

    # The reaper.

    @rule()
    def reap(self) -> None:
        dropped, freed = [], 0
        for job_id, job in self.jobs.items():
            for index, lease in list(job.leases.items()) if job.is_active and job.todo else []:
                if not self.holds(lease):
                    job.end_lease(index)
                    freed += 1
                    if lease.worker not in self.alive:
                        job.lost.setdefault(index, set()).add(lease.worker)
            if job.is_active and any(len(lost) >= MAX_LOSSES for lost in job.lost.values()):
                job.status = JobStatus.FAILED
                dropped.append(job_id)
        (found,) = self.stores["w1"].stuck(MODEL)
        assert found.unfinished == [i for i, job in self.active().items() if not job.todo]
        assert (found.n_dropped, found.n_freed, found.broken) == (len(dropped), freed, [])
        assert self.store.recount() == self.store.queued_nonces()

    # What always holds.

    @invariant()
    def redis_holds_what_the_model_says(self) -> None:
        if not hasattr(self, "store"):
            return
        active = self.active()
        assert self.store.active_jobs(MODEL) == list(active)
        assert self.store.queued_nonces() == sum(job.n_left for job in active.values())
        for job_id, job in active.items():
            assert pending(self.store, job_id) == sorted(job.todo - job.leases.keys())
        counts = self.store.count_active()
        statuses = [job.status for job in active.values()]
        assert counts.queued == statuses.count(JobStatus.QUEUED)
        assert counts.running == statuses.count(JobStatus.RUNNING)

    def finish_everything(self) -> None:
        """No nonce is lost: a worker that comes at last completes what did not end, and every
        answer is right.
        """
        self.redis.delete(keys.generating(MODEL))
        for name in list(self.alive):
            del self.alive[name]
            self.registry.remove(name)
        self.reap()
        self.start_worker()
        store = list(self.alive.values())[-1].store
        while isinstance(found := store.lease(MODEL), list) and found:
            store.complete(found[0], values_of(found[0]))
            self.jobs[found[0].owner_id].todo.discard(found[0].place)
        for job_id, job in self.jobs.items():
            if job.is_active:
                assert self.store.finish(job_id)
                job.status = JobStatus.COMPLETED
            self.check_end(job_id, job)
        assert (self.store.queued_nonces(), self.store.active_jobs(MODEL)) == (0, [])
        assert [key for key in self.redis.scan_iter("*") if int(self.redis.ttl(key)) < 0] == []

    def check_end(self, job_id: str, job: Job) -> None:
        record = self.store.read(job_id)
        assert record is not None
        assert record.status is job.status
        if job.status is not JobStatus.COMPLETED:
            assert result_body(self.store, job_id) is None
            return
        answer = json.loads(result_body(self.store, job_id) or b"")
        name = job.new.spec.block_hash
        expected = [{"nonce": n, "vector_b64": f"{name}:{n}"} for n in job.new.nonces if n % 5 != 4]
        assert answer["artifacts"] == expected
        assert answer.get("excluded_nonces", []) == [n for n in job.new.nonces if n % 5 == 4]

    # The model's own.

    def job(self, pick: int) -> tuple[str, Job]:
        return list(self.jobs.items())[pick % len(self.jobs)]

    def hand(self, pick: int, keeps: bool) -> tuple[str, Lease]:
        index = pick % len(self.in_hand)
        return self.in_hand[index] if keeps else self.in_hand.pop(index)

    def holds(self, lease: Named) -> bool:
        """Its worker lives and did not tell that it has forgotten it."""
        worker = self.alive.get(lease.worker)
        return worker is not None and (lease.number > worker.n_told or lease.number in worker.told)

    @property
    def a_round_generates(self) -> bool:
        return bool(self.redis.exists(keys.generating(MODEL)))

    def in_line(self) -> list[tuple[str, Job]]:
        return sorted(self.jobs.items(), key=lambda named: named[1].at)

    def expected_next(self, lease: Named) -> tuple[str, int] | None:
        """The batch that is leased next."""
        if self.a_round_generates:
            return None
        for job_id, job in self.in_line():
            for index in job.in_line:
                self.grant(job, index, lease)
                return job_id, index
        return None

    def grant(self, job: Job, index: int, lease: Named) -> None:
        job.leases[index] = lease
        job.came_back.discard(index)
        job.status = JobStatus.RUNNING

    def expected_more(self, first: Lease, lease: Named, room: int) -> list[tuple[str, int]]:
        """The batches that a worker gets beside one."""
        found: list[tuple[str, int]] = []
        for job_id, job in self.in_line():
            for index in job.in_line if job.new.spec == first.spec and not first.alone else []:
                n = len(job.new.batch(index))
                if room <= 0 or n > room or index in job.lost:
                    break
                room -= n
                self.grant(job, index, lease)
                found.append((job_id, index))
        return found

    def active(self) -> dict[str, Job]:
        return {job_id: job for job_id, job in self.jobs.items() if job.is_active}


TestJobsAgainstTheirModel = FUZZ(JobMachine.TestCase)
