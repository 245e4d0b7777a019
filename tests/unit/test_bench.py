"""The benchmarks' own rules: which runs count, how a job is polled, what passes."""

import io
import json
import os
from collections import Counter

import pytest

from api.chat.prefixes import Prefix
from bench import challenge, queue_overhead, queue_scale
from bench.fleet import pump
from bench.fleet.figures import Look, Stretch
from bench.harness import machine
from bench.harness.machine import Observed, Usage
from bench.harness.timed_job import JobRun
from bench.prefix_routing import __main__ as prefix_routing
from bench.prefix_routing.noted import Move, NotedMemory, Why, moves
from bench.queue_overhead import CASES, Pair
from bench.reading import console_pages, pollers
from tests.harness.samples import worker_record


def usage(others: float = 0.0) -> Usage:
    return Usage(wall_s=10, own=1, others=others, load_before=1, load_after=1)


def calls_until_done(others: list[float], repeat: int) -> list[Observed[int]]:
    return machine.repeated(lambda index: (index, others[index]), repeat)


def test_undisturbed_runs_all_count() -> None:
    runs = calls_until_done([0.0, 0.05, 0.01], repeat=3)
    assert [(run.result, run.counts) for run in runs] == [(0, True), (1, True), (2, True)]


def test_a_disturbed_run_is_repeated_and_does_not_count() -> None:
    runs = calls_until_done([0.5, 0.0, 0.02], repeat=2)
    assert [(run.result, run.counts) for run in runs] == [(0, False), (1, True), (2, True)]


def test_on_a_busy_machine_the_quietest_runs_count() -> None:
    runs = calls_until_done([0.9, 0.8, 0.7, 1.0, 0.6, 0.9], repeat=2)
    assert [run.result for run in runs if run.counts] == [2, 4]


def test_a_process_tree_holds_this_process_and_its_cpu_time() -> None:
    tree = machine.tree_cpu_s(os.getpid())
    assert tree[os.getpid()] > 0
    assert machine.tree_cpu_s(0x7FFFFFFF) == {}


@pytest.mark.parametrize(
    ("elapsed_s", "n_done", "expected_s"),
    [(1, 0, 0.25), (10, 50, 0.5), (10, 99, 0.0505), (10, 100, 0.01)],
)
def test_a_job_is_looked_at_more_often_towards_its_end(
    elapsed_s: int, n_done: int, expected_s: float
) -> None:
    assert timed_job.pause_s(elapsed_s, n_done, 100) == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize(("bare_s", "passed"), [(9.1, True), (8.9, False)])
def test_the_overhead_is_judged_by_the_median_of_the_runs_that_count(
    bare_s: float, passed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def pair(queue_s: float, loop_s: float, counts: bool = True) -> Observed[Pair]:
        runs = [queue_overhead.Run(seconds, {}, usage()) for seconds in (queue_s, loop_s)]
        return Observed(Pair(*runs), 0.0, counts)

    pairs = [pair(10, bare_s), pair(10, bare_s), pair(30, 5), pair(99, 1, counts=False)]
    assert queue_overhead.report(CASES[0], pairs) is passed
    assert ("PASS" if passed else "FAIL") in capsys.readouterr().out


@pytest.mark.parametrize(("rate_of_16", "passed"), [(310, True), (303, False)])
def test_the_scale_is_judged_by_its_smallest_ratio(
    rate_of_16: int, passed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(rate: float) -> Observed[queue_scale.Run]:
        job = JobRun(seconds=1000 / rate, post_s=0, finish_s=0, artifacts=[])
        return Observed(queue_scale.Run(job, 1000, 2.0, 0.5, 0.1, usage()), 0.0)

    assert queue_scale.report({1: [run(19.8)], 16: [run(rate_of_16)]}) is passed
    assert f"{rate_of_16 / 320:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cores", "commands", "missed"),
    [(0.049, 109, None), (0.06, 100, "0.060 of a core"), (0.01, 150, "150 commands")],
)
def test_what_pages_of_the_console_may_cost(
    cores: float, commands: float, missed: str | None
) -> None:
    costs = [
        console_pages.Cost(0, 0.0, 50, 9, 0),
        console_pages.Cost(1, 0.01, 100, 10, 1),
        console_pages.Cost(50, cores, commands, 10, 50),
    ]
    found = console_pages.verdict(costs)
    assert (missed is None) if found is None else (missed is not None and missed in found)


@pytest.mark.parametrize(("ours_ms", "passed"), [(49, True), (51, False)])
def test_pollers_are_judged_by_the_worst_median_p99_over_the_bare_route(
    ours_ms: float, passed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [[10.0] * 200, [10.0] * 200, [99.0] * 200]
    turns = {"a bare route": bare, "a job": [[20.0] * 200] * 3, "the status": [[ours_ms] * 200] * 3}
    assert pollers.report(turns, "pollers") is passed
    assert f"{ours_ms / 10:.2f}" in capsys.readouterr().out


def test_growth_is_that_of_the_line_through_all_looks_but_the_first_quarter() -> None:
    looks = growth.Growth()
    for number in range(20):
        looks.look({"keys": 100.0 + number + (50 if number < 5 else 0), "flat": 7.0})
    looks.look({"keys": 120.0, "flat": 7.0, "new": 1.0})
    found = looks.per_segment()
    assert found == {"keys": pytest.approx(1.0), "flat": pytest.approx(0.0)}


def challenged(
    slower: float = 0.0,
    mib: float = 0.0,
    problems: list[str] = [],  # noqa: B006
    begin_mib: float = 90.0,
    counters: int = 0,
) -> challenge.Found:
    """A challenge of 240 segments whose worker grew by so many MiB in all."""
    paces = [1000.0] * 120 + [1000.0 * (1 - slower)] * 120
    found = challenge.Found(paces, n_nonces=5, counters=counters, problems=[*problems])
    for number in range(240):
        found.growth.look(
            {
                "keys": 60.0,
                "MiB of worker-0": begin_mib + mib * number / 240,
                "descriptors of api": 20.0,
            }
        )
    return found


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        (challenged(slower=0.019, mib=3.9), True),
        (challenged(slower=0.021), False),
        (challenged(slower=-0.021), False),
        (challenged(mib=4.1), False),
        (challenged(mib=39, begin_mib=2000), True),
        (challenged(mib=41, begin_mib=2000), False),
        (challenged(counters=challenge.MOST_COUNTERS), True),
        (challenged(counters=challenge.MOST_COUNTERS + 1), False),
        (challenged(problems=["round r: missing [5], repeated []"]), False),
    ],
)
def test_a_challenge_is_judged_by_pace_growth_and_nonces(
    found: challenge.Found, passed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert challenge.report(found) is passed
    told = capsys.readouterr().out
    assert ("FAIL" in told) is not passed
    assert all(problem in told for problem in found.problems)


def test_each_turn_that_goes_to_another_engine_is_told_with_its_reason() -> None:
    file = io.StringIO()
    memory = NotedMemory(file)
    active: Counter[str] = Counter()

    def turn(conversation: str, names: str, silent: str = "") -> str:
        """The worker that answers, of those that are known."""
        prefix = Prefix((conversation.encode(),), 0, 1)
        workers = [worker_record(name, "m") for name in names]
        for worker in memory.order(prefix, workers, active.__getitem__):
            memory.remember(prefix, worker.id)
            if worker.id not in silent:
                return worker.id
        raise AssertionError("nobody answers")

    homes = {name: turn(name, "ab") for name in "pqrstuvwxyz"}
    assert [turn(name, "ab") for name in homes] == list(homes.values())
    full, gone, silent = [name for name, worker in homes.items() if worker == "a"][:3]
    active["a"] = 4  # of five under way each may have four
    assert turn(full, "ab") == "b"
    active.clear()
    assert (turn(gone, "b"), turn(silent, "ab", silent="a")) == ("b", "b")
    turn("new", "ab", silent="a")  # was nowhere before
    found = [(move.worker, move.why) for move in moves(file.getvalue().splitlines())]
    assert found == [("a", Why.FULL), ("a", Why.GONE), ("a", Why.GONE)]


def test_a_turn_that_moves_though_its_engine_has_room_is_told() -> None:
    lines = [
        {"of": "p", "turn": None},
        {"of": "p", "asked": "a"},
        {"of": "p", "turn": Why.OTHER},
        {"of": "p", "asked": "b"},
    ]
    assert list(moves(map(json.dumps, lines))) == [("p", "a", Why.OTHER)]
    assert prefix_routing.only_with_reason("two", [Move("p", "a", Why.OTHER)], gone=0) is False


def test_a_window_of_the_fleet_without_nonces_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def window(n_nonces: int) -> Stretch:
        return Stretch(Look(0.0, 0.0, {}, 0, 0, {}), Look(2.0, 1.0, {}, 0, n_nonces, {}))

    found = {1: [window(0), window(8)], 2: [window(0)]}
    monkeypatch.setattr(pump, "_measure", lambda n, *_: found[n])
    assert pump.in_turns([1], 8, 6.0)[1].n_nonces == 8
    with pytest.raises(RuntimeError, match="2 workers computed nothing"):
        pump.in_turns([2], 8, 6.0)
