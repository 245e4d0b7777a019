"""The workers of one machine: what is shown of an ended one's log."""

import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cli.supervise import fleet
from cli.supervise.fleet import Fleet, telling_lines
from cli.supervise.processes import Child
from tests.harness.waiting import wait_until


def test_a_cause_far_above_the_end_of_a_log_is_shown_with_it() -> None:
    cause = "worker pid=7: ValueError: no memory left"
    log = ["started", cause, *[f"line {i}" for i in range(100)], "RuntimeError: see above"]
    assert telling_lines(log) == [cause, "...", *log[-fleet.ERROR_TAIL_LINES :]]
    assert telling_lines(log[-5:]) == log[-5:]


def fleet_of(*children: dict[str, Any]) -> Fleet:
    found = Fleet("h1", list, [], 0, lambda _name, _line: None, lambda _message: None)
    common: dict[str, Any] = {
        "gave_up": None,
        "was_ready": False,
        "is_ready": False,
        "tail": [],
        "spec": SimpleNamespace(name="h1/cpu0"),
    }
    found.children = [SimpleNamespace(**common | child) for child in children]  # type: ignore[misc]
    return found


def test_a_fleet_serves_when_all_that_are_not_given_up_have_been_ready() -> None:
    ready: dict[str, Any] = {"was_ready": True, "is_ready": True}
    assert fleet_of(ready, ready | {"is_ready": False}).is_serving
    assert fleet_of(ready, {"gave_up": "h1/cpu1 ended"}).is_serving
    assert not fleet_of(ready, {}).is_serving
    assert not fleet_of({"was_ready": True, "gave_up": "h1/cpu0 ended"}).is_serving
    assert fleet_of(ready, ready, {}).n_ready == 2


def test_the_reason_is_the_last_error_of_the_log_with_all_its_lines() -> None:
    log = [
        "loading",
        "ValueError: earlier",
        "more",
        "error: vLLM cannot start with the model m: 1 error",
        "  too long",
    ]
    lost: dict[str, Any] = {
        "gave_up": "h1/cpu0 ended (exit code 1); not restarted: 2 times in a row",
        "tail": log,
    }
    assert (
        fleet_of(lost).reason()
        == f"{lost['gave_up']}. error: vLLM cannot start with the model m: 1 error too long"
    )
    assert fleet_of(lost, {}).reason() is None
    assert fleet_of(lost | {"tail": ["killed"]}).reason() == f"{lost['gave_up']}."


def test_the_last_lines_of_each_worker_are_told() -> None:
    log = [str(i) for i in range(30)] + ["x" * 1000]
    (told,) = fleet_of({"tail": log, "pid": 7}).logs()
    assert (told.name, told.pid, told.lines) == (
        "h1/cpu0",
        7,
        [*map(str, range(11, 30)), "x" * 300],
    )


def test_what_the_workers_go_without_is_told_once() -> None:
    said = "--swap-space: vLLM 0.32.0 does not know it"
    code = f"print('WARNING/MainProcess] left out {said}', flush=True)"
    heard: list[str] = []
    fleet = Fleet(
        "h1",
        lambda: [sys.executable, "-c", code],
        [{}, {}],
        max_fast_crashes=0,
        on_line=lambda name, line: heard.append(f"{name} {line}"),
        announce=lambda _message: None,
    )
    fleet.start({})
    try:
        wait_until(lambda: len([line for line in heard if said in line]) == 2, "both lines")
        assert fleet.left_out == [said]
        assert {line.split()[0] for line in heard} == {"h1/cpu0", "h1/cpu1"}
    finally:
        fleet.stop()


def test_a_worker_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    start = Child.start
    pids: list[int] = []

    def start_one(child: Child) -> None:
        if pids:
            raise RuntimeError("can't start new thread")
        start(child)
        wait_until(lambda: child.pid, "the first worker")
        pids.append(child.pid or 0)

    monkeypatch.setattr(Child, "start", start_one)
    fleet = Fleet("h1", lambda: sleeps, [{}, {}], 0, lambda *_: None, lambda _: None)
    with pytest.raises(RuntimeError):
        fleet.start({})
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the first worker's end")
