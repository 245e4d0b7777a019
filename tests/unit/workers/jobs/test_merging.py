"""A worker computes as many batches together as a micro-batch holds."""

import threading
from types import SimpleNamespace

import pytest

from poc_core.records import JobStatus
from poc_core.state.jobs import JobStore
from tests.harness.job_turns import MakeRunner, artifacts, expected, job_of, read
from tests.harness.samples import OTHER_SPEC, SPEC, Clock, new_job
from tests.peers.fake_engine import FakeEngine
from workers import work as work_module
from workers.work import Work


def test_an_engine_without_chat_gets_whole_micro_batches(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine
) -> None:
    job_id = jobs.create(new_job(list(range(300)), batch_size=300))
    make_runner(None).run()
    assert [len(nonces) for nonces in engine.begun] == [128, 128, 44]
    assert len(engine.slices) == 3
    assert artifacts(jobs, job_id) == expected(range(300))


def test_what_comes_meanwhile_joins_what_is_computed(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine
) -> None:
    came: list[str] = []
    engine.events[0] = lambda: came.append(jobs.create(job_of(OTHER_SPEC, [9])))
    job_id = jobs.create(new_job([0, 1]))
    assert not make_runner(None).run()
    assert artifacts(jobs, job_id) == expected([0, 1])
    assert artifacts(jobs, came[0]) == expected([9], OTHER_SPEC)


def test_a_turn_ends_at_its_time_and_the_next_one_goes_on_with_what_is_in_hand(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, now = make_runner(None), Clock()
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=now))
    job_ids = [
        jobs.create(job_of(spec, list(range(n)))) for spec, n in ((SPEC, 2), (OTHER_SPEC, 3))
    ]
    go_on = threading.Event()

    def time_passes() -> None:
        now.now += 10
        go_on.wait(60)

    engine.events[0] = time_passes
    assert runner.run(now.now + 10)
    assert runner._runner.held  # noqa: SLF001
    go_on.set()
    assert not runner.run()
    assert not runner._runner.held  # noqa: SLF001
    assert [artifacts(jobs, job_id) for job_id in job_ids] == [
        expected(range(2)),
        expected(range(3), OTHER_SPEC),
    ]
    assert runner.take_counts() == {f"job {job_ids[0]}": 2, f"job {job_ids[1]}": 3}
    assert runner.take_counts() == {}


# Merging.


def test_batches_of_a_job_are_computed_together_and_each_gets_its_own_values(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    nonces = list(range(50, 33, -1))
    job_id = jobs.create(new_job(nonces))
    for _ in range(3):
        assert not runner.run()  # what is done is not computed again
    assert engine.begun == [nonces]
    assert read(jobs, job_id).status is JobStatus.COMPLETED
    assert artifacts(jobs, job_id) == expected(nonces)


def test_batches_of_other_jobs_with_the_same_spec_join(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    ours = [jobs.create(new_job([n, n + 1, n + 2])) for n in (0, 10, 20)]
    other = jobs.create(job_of(OTHER_SPEC, [30]))
    runner.run()
    computed = sorted(sorted(nonces) for nonces in engine.begun)
    assert computed == [[0, 1, 2, 10, 11, 12, 20, 21, 22], [30]]
    assert [artifacts(jobs, job_id) for job_id in ours] == [
        expected([n, n + 1, n + 2]) for n in (0, 10, 20)
    ]
    assert artifacts(jobs, other) == expected([30], OTHER_SPEC)


def test_no_more_is_leased_than_a_micro_batch_holds(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    job_id = jobs.create(new_job(list(range(300)), batch_size=50))
    runner.run()
    # 128 fit: two batches
    assert engine.begun == [list(range(first, first + 100)) for first in (0, 100, 200)]
    assert artifacts(jobs, job_id) == expected(range(300))
