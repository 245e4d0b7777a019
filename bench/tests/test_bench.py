"""The benchmarks' own rules: which runs count, how a job is polled, what passes."""

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from bench import challenge, decode_speed, queue_scale
from bench.fleet import pump
from bench.fleet.figures import Look, Stretch
from bench.harness import machine, node, overhead
from bench.harness.machine import Observed, Usage
from bench.harness.overhead import Pair
from bench.reading import console_pages, pollers
from poc_core.records import ModelInfo

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("others", "repeat", "runs"),
    [
        ([0.0, 0.05, 0.01], 3, [(0, True), (1, True), (2, True)]),
        ([0.5, 0.0, 0.02], 2, [(0, False), (1, True), (2, True)]),
        # On a busy machine the least disturbed runs count.
        ([0.9, 0.8, 0.7, 1.0, 0.6, 0.9], 2, [(n, n in (2, 4)) for n in range(6)]),
    ],
)
def test_disturbed_runs_are_repeated_and_do_not_count(
    others: list[float], repeat: int, runs: list[tuple[int, bool]]
) -> None:
    found = machine.repeated(lambda index: (index, others[index]), repeat)
    assert [(run.result, run.counts) for run in found] == runs


def test_a_process_tree_has_the_cpu_time_of_this_process() -> None:
    assert machine.tree_cpu_s(os.getpid()) > 0
    assert machine.tree_cpu_s(0x7FFFFFFF) == 0


@pytest.mark.parametrize(
    ("elapsed_s", "n_done", "expected_s"),
    [(1, 0, 0.25), (10, 50, 0.5), (10, 99, 0.0505), (10, 100, 0.01)],
)
def test_a_job_is_polled_more_often_towards_its_end(
    elapsed_s: int, n_done: int, expected_s: float
) -> None:
    assert node.pause_s(elapsed_s, n_done, 100) == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize(("bare_s", "passed"), [(9.1, True), (8.9, False)])
def test_the_overhead_is_judged_by_the_median_of_the_runs_that_count(
    bare_s: float, passed: bool, capsys: Capture
) -> None:
    def pair(seconds: float, loop_s: float, counts: bool = True) -> Observed[Pair]:
        return Observed(Pair(100, seconds, loop_s), 0.0, counts)

    pairs = [pair(10, bare_s), pair(10, bare_s), pair(30, 5), pair(99, 1, counts=False)]
    assert overhead.report("queue", pairs, 0.9) is passed
    assert ("PASS" if passed else "FAIL") in capsys.readouterr().out


@pytest.mark.parametrize(("rate_of_16", "passed"), [(310, True), (303, False)])
def test_the_scale_is_judged_by_its_smallest_ratio(
    rate_of_16: int, passed: bool, capsys: Capture
) -> None:
    def run(rate: float) -> Observed[queue_scale.Run]:
        return Observed(queue_scale.Run(1000 / rate, 1000, (2.0, 0.5, 0.1), Usage(1, 0)), 0.0)

    assert queue_scale.report({1: [run(19.8)], 16: [run(rate_of_16)]}) is passed
    assert f"{rate_of_16 / 320:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cores", "commands", "passed"),
    [(0.049, 109, True), (0.06, 100, False), (0.01, 150, False)],
)
def test_what_pages_of_the_console_may_cost(cores: float, commands: float, passed: bool) -> None:
    none = console_pages.Cost(0, 0.0, 50, 9, 0)
    one = console_pages.Cost(1, 0.01, 100, 10, 1)
    many = console_pages.Cost(50, cores, commands, 10, 50)
    assert console_pages.report(none, one, many) is passed


@pytest.mark.parametrize(("ours_ms", "passed"), [(49, True), (51, False)])
def test_pollers_are_judged_by_the_worst_median_p99_over_the_bare_route(
    ours_ms: float, passed: bool, capsys: Capture
) -> None:
    bare = [[10.0] * 200, [10.0] * 200, [99.0] * 200]
    turns = {"a bare route": bare, "a job": [[20.0] * 200] * 3, "the status": [[ours_ms] * 200] * 3}
    assert pollers.report(turns, "pollers") is passed
    assert f"{ours_ms / 10:.2f}" in capsys.readouterr().out


def test_growth_is_that_of_the_line_through_all_looks_but_the_first_quarter() -> None:
    found = challenge.Found()
    for number in range(20):
        found.looks.append({"keys": 100.0 + number + (50 if number < 5 else 0), "flat": 7.0})
    found.looks.append({"keys": 120.0, "flat": 7.0, "new": 1.0})
    assert found.per_segment() == {"keys": pytest.approx(1.0), "flat": pytest.approx(0.0)}


def challenged(
    slower: float = 0.0, mib: float = 0.0, problem: str = "", begin_mib: float = 90.0, more: int = 0
) -> challenge.Found:
    """A challenge of 240 segments whose worker grew by `mib` MiB in all."""
    paces = [1000.0] * 120 + [1000.0 * (1 - slower)] * 120
    looks = [
        {"keys": 60.0, "MiB of worker-0": begin_mib + mib * n / 240, "descriptors of api": 20.0}
        for n in range(240)
    ]
    counters = challenge.MOST_COUNTERS + more
    return challenge.Found(paces, looks, 5, counters, [problem] if problem else [])


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        (challenged(slower=0.019, mib=3.9), True),
        (challenged(slower=0.021), False),
        (challenged(slower=-0.021), False),
        (challenged(mib=4.1), False),
        (challenged(mib=39, begin_mib=2000), True),
        (challenged(mib=41, begin_mib=2000), False),
        (challenged(more=1), False),
        (challenged(problem="round r: missing [5], repeated []"), False),
    ],
)
def test_a_challenge_is_judged_by_pace_growth_and_nonces(
    found: challenge.Found, passed: bool, capsys: Capture
) -> None:
    assert challenge.report(found) is passed
    printed = capsys.readouterr().out
    assert ("FAIL" in printed) is not passed
    assert all(problem in printed for problem in found.problems)


def test_a_window_of_the_fleet_without_nonces_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def window(n_nonces: int) -> Stretch:
        return Stretch(Look(0.0, 0.0, 0, 0, 0, {}), Look(2.0, 1.0, 0, 0, n_nonces, {}))

    found = {1: [window(0), window(8)], 2: [window(0)]}
    monkeypatch.setattr(pump, "_measure", lambda n, *_: found[n])
    assert pump.in_turns([1], 8, 6.0)[1].n_nonces == 8
    with pytest.raises(RuntimeError, match="2 workers computed nothing"):
        pump.in_turns([2], 8, 6.0)


@pytest.mark.parametrize("n", [1, 2, 33])
def test_the_pump_acts_as_every_worker_of_a_fleet(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[pump.Order] = []

    def popen(_command: Any, **_options: Any) -> Any:
        def write(text: bytes) -> None:
            orders.append(pump.Order.model_validate_json(text))

        return SimpleNamespace(stdin=SimpleNamespace(write=write, close=lambda: None))

    monkeypatch.setattr(pump.subprocess, "Popen", popen)
    pump.start("redis://", n, 8, 1.0)
    assert [k for one in orders for k in range(one.first, one.first + one.workers)] == [*range(n)]


def test_no_measured_chain_records_the_graphs_of_its_length(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    now, seen = [0.0], Counter[Any]()

    def record(*shape: Any) -> None:
        seen[shape] += 1
        now[0] += 2.0 if seen[shape] > 1 else 32.0  # 30 s to record

    def chains(_engine: Any, _seq_len: int, length: int, n: int, _block_hash: str) -> list[Any]:
        record(length, n)
        return [[0] * (length + 1)] * n

    def judged(_engine: Any, spec: Any, nonces: Any) -> list[Any]:
        record(spec.options["max_tokens"], len(nonces), spec.options.get("stepwise"))
        return [[0, 0.0]] * len(nonces)

    own = decode_speed.Generation(1.0, 1.0)
    for name, stand_in in {
        "chains": chains,
        "compute_all": judged,
        "generate": lambda *_: own,
        "random_prompts": lambda *_: [],
        "time": SimpleNamespace(perf_counter=lambda: now[0]),
    }.items():
        monkeypatch.setattr(decode_speed, name, stand_in)
    engine: Any = SimpleNamespace(info=ModelInfo("m", 256, 4, 512, 4096, "float32"))
    decode_speed.best_of(engine, 16, 64, [8], repeat=2, ways=[True])
    assert '"ratio": 0.5,' in capsys.readouterr().out
    decode_speed.validation(engine, 16, 64, 8, repeat=1, ways=[True])
    assert "step by step (graphs), 32 at a time: 2.00 s" in capsys.readouterr().out
