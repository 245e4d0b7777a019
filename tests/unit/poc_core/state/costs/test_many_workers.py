"""What a worker's batch costs Redis, however many other workers there are."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
from fakeredis.commands_mixins.scripting_mixin import ScriptingCommandsMixin
from redis import Redis

from poc_core.records import Lease, NewJob, RoundRecord, RoundState
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    MODEL,
    REQUEST,
    SPEC,
    Clock,
    complete_lease,
    lease_nonces,
    round_config,
    work_of,
)

Serve = Callable[..., Any]

FLEETS = (16, 180)


@contextmanager
def counted_steps() -> Iterator[Counter[str]]:
    """Within: the commands that scripts call, by name."""
    steps: Counter[str] = Counter()
    call = ScriptingCommandsMixin._lua_redis_call  # noqa: SLF001

    def counted(self: Any, runtime: Any, names: Any, command: bytes, *args: Any) -> Any:
        steps[command.decode().lower()] += 1
        return call(self, runtime, names, command, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptingCommandsMixin, "_lua_redis_call", counted)
        yield steps


@pytest.fixture
def record(rounds: RoundStore) -> RoundRecord:
    found = rounds.read(rounds.store(round_config(), RoundState.GENERATING))
    assert found is not None
    return found


def leased(rounds: RoundStore, record: RoundRecord, worker: str) -> Lease:
    found = lease_nonces(rounds, record, worker, 4)
    assert isinstance(found, Lease)
    return found


def steps_of_a_batch(
    rounds: RoundStore, record: RoundRecord, n_workers: int, serve: Serve
) -> float:
    """Commands that the scripts of one batch of a round call, of a worker among so many."""
    held: dict[str, list[Lease]] = {}
    for number in range(n_workers):
        worker = f"w{number}-of-{n_workers}"
        serve(worker)
        held[worker] = [leased(rounds, record, worker)]
        held[worker].append(leased(rounds, record, worker))
    with counted_steps() as steps:
        for worker in list(held)[:16]:
            lease = held[worker].pop(0)
            assert complete_lease(rounds, lease, worker, [f"v{nonce}" for nonce in lease.nonces])
            leased(rounds, record, worker)
    return steps.total() / 16


def test_a_batch_of_a_round_costs_as_much_among_many_workers(
    rounds: RoundStore, record: RoundRecord, serve: Serve
) -> None:
    few, many = (steps_of_a_batch(rounds, record, n, serve) for n in FLEETS)
    assert many <= 1.1 * few
    assert many <= 18


def test_among_many_workers_a_dead_ones_nonces_are_handed_on_within_a_second(
    rounds: RoundStore, record: RoundRecord, workers: WorkerRegistry, clock: Clock, serve: Serve
) -> None:
    held = {}
    for number in range(20):
        serve(f"w{number}")
        held[f"w{number}"] = leased(rounds, record, f"w{number}")
    clock.now += 0.1
    workers.remove("w3")
    clock.now += 1
    assert leased(rounds, record, "w7").nonces == held["w3"].nonces


def test_a_worker_reads_a_round_without_what_each_other_computed(
    rounds: RoundStore, record: RoundRecord, redis: Redis, clock: Clock, serve: Serve
) -> None:
    serve("w1")
    lease = leased(rounds, record, "w1")
    complete_lease(rounds, lease, "w1", [f"v{nonce}" for nonce in lease.nonces])
    clock.now += 1
    leased(rounds, record, "w1")
    assert b"by:w1" in cast(list[bytes], redis.hkeys(f"poc:round:{record.round_id}"))
    asked: list[object] = []
    redis.execute_command = lambda *args, **_: asked.append(args[0])  # type: ignore[method-assign]
    with suppress(TypeError):  # there is no answer
        rounds.read(record.round_id)
    assert asked == ["HMGET"]


def test_all_workers_are_read_with_one_question(
    workers: WorkerRegistry, redis: Redis, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        serve(f"w{number}")
    assert len(workers.live()) == 20  # from now on Redis has the script
    asked: list[object] = []
    ask = redis.execute_command

    def noted(*args: Any) -> Any:
        asked.append(args[0])
        return ask(*args)

    monkeypatch.setattr(redis, "execute_command", noted)
    workers.live()
    assert asked == ["EVALSHA"]


def steps_of_next(jobs: JobStore, room: int) -> tuple[int, int]:
    """Commands called by the script that leases what is next, and how many batches it found."""
    work = work_of(jobs, "asks")
    with counted_steps() as steps:
        found = work.lease(MODEL)
        assert isinstance(found, list)
        more = work.lease_more(found[0], room)
    return steps.total(), len(more)


@pytest.mark.parametrize("n_workers", FLEETS)
def test_what_is_next_costs_the_same_however_many_jobs_others_have_in_hand(
    jobs: JobStore, clock: Clock, serve: Serve, n_workers: int
) -> None:
    for nonce in range(n_workers + 10):
        jobs.create(NewJob(MODEL, SPEC, REQUEST, [nonce], 1, None))
        clock.now += 0.001
    serve("w")
    for _ in range(n_workers):
        assert work_of(jobs, "w").lease(MODEL)
    steps, n_found = steps_of_next(jobs, room=4)
    assert n_found == 4
    assert steps <= 190


def test_what_is_next_costs_the_same_however_many_batches_others_have_in_hand(
    jobs: JobStore, serve: Serve
) -> None:
    jobs.create(NewJob(MODEL, SPEC, REQUEST, list(range(400)), 1, None))
    serve("w")
    for _ in range(199):
        work_of(jobs, "w").lease(MODEL)
    steps, n_found = steps_of_next(jobs, room=4)
    assert n_found == 4
    assert steps <= 90
