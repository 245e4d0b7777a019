"""What a worker's batch costs Redis, however many other workers there are."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
from fakeredis.commands_mixins.scripting_mixin import ScriptingCommandsMixin
from redis import Redis

from poc_core.records import Lease, NewJob, RoundRecord, RoundState
from poc_core.state import JobStore, RoundStore, WorkerRegistry
from tests.harness.samples import MODEL, REQUEST, SPEC, Clock, round_config

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


def leased(
    rounds: RoundStore, record: RoundRecord, worker: str, in_hand: list[Lease] | None = None
) -> Lease:
    found = rounds.lease(record, worker, 4, in_hand or [])
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
        held[worker].append(leased(rounds, record, worker, held[worker]))
    with counted_steps() as steps:
        for worker in list(held)[:16]:
            lease = held[worker].pop(0)
            assert rounds.complete(lease, worker, [f"v{nonce}" for nonce in lease.nonces])
            leased(rounds, record, worker, held[worker])
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
    assert leased(rounds, record, "w7", [held["w7"]]).nonces == held["w3"].nonces


def test_a_worker_reads_a_round_without_what_each_other_computed(
    rounds: RoundStore, record: RoundRecord, redis: Redis, clock: Clock, serve: Serve
) -> None:
    serve("w1")
    lease = leased(rounds, record, "w1")
    rounds.complete(lease, "w1", [f"v{nonce}" for nonce in lease.nonces])
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


def steps_beside(jobs: JobStore, job_id: str, index: int, room: int) -> tuple[int, int]:
    """Commands called by the script that looks for batches beside one, and how many it found."""
    name = jobs.name_lease("asks")
    lease = jobs.lease(job_id, index, "asks", name)
    assert isinstance(lease, Lease)
    with counted_steps() as steps:
        found = jobs.lease_more(lease, name, room)
    return steps.total(), len(found)


@pytest.mark.parametrize("n_workers", FLEETS)
def test_room_beside_a_batch_is_filled_from_behind_those_that_others_have_in_hand(
    jobs: JobStore, clock: Clock, serve: Serve, n_workers: int
) -> None:
    """The oldest jobs are all in hand where many workers are."""
    job_ids = []
    for nonce in range(n_workers + 10):
        job_ids.append(jobs.create(NewJob(MODEL, SPEC, REQUEST, [nonce], 1, None)))
        clock.now += 0.001
    serve("w")
    for job_id in job_ids[:n_workers]:
        assert isinstance(jobs.lease(job_id, 0, "w"), Lease)
    steps, n_found = steps_beside(jobs, job_ids[n_workers], 0, room=4)
    assert n_found == 4
    assert steps <= 90


def test_neighbours_that_others_have_in_hand_are_passed_over_together(
    jobs: JobStore, serve: Serve
) -> None:
    job_id = jobs.create(NewJob(MODEL, SPEC, REQUEST, list(range(400)), 1, None))
    serve("w")
    for index in range(1, 200):
        jobs.lease(job_id, index, "w")
    steps, n_found = steps_beside(jobs, job_id, 0, room=4)
    assert n_found == 0
    assert steps <= 12
