"""The supervisor of child processes, with trivial commands for children."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.supervise import processes
from cli.supervise.processes import Child, ChildSpec, describe_exit
from tests.harness.waiting import wait_until
from tests.integration.processes import is_running

pytestmark = pytest.mark.integration

# Starts a grandchild that ignores SIGTERM, in a session of its own, and writes both pids.
WITH_GRANDCHILD = """
import os, pathlib, signal, subprocess, sys, time
grandchild = subprocess.Popen(
    [sys.executable, "-c",
     "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True,
)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(f"{os.getpid()} {grandchild.pid}")
path.with_suffix(".new").rename(path)
time.sleep(600)
"""
# Does not end at SIGTERM.
DEAF = """
import signal, time
signal.signal(15, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


class Recorder:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.announcements: list[str] = []

    def on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def announce(self, message: str) -> None:
        self.announcements.append(message)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code), *arguments]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def started(recorder: Recorder) -> Iterator[Callable[[ChildSpec], Child]]:
    children: list[Child] = []

    def start(spec: ChildSpec) -> Child:
        child = Child(spec, recorder.on_line, recorder.announce)
        children.append(child)
        child.start()
        return child

    yield start
    for child in children:
        child.request_stop()
        child.request_stop()
        child.wait_stopped()


@pytest.fixture
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 0.01)


def test_lines_of_both_streams_arrive_with_the_childs_name(
    started: Callable[[ChildSpec], Child], recorder: Recorder
) -> None:
    code = (
        "import sys, time; print('out'); print('bar 1\\rbar 2', file=sys.stderr, flush=True);"
        " time.sleep(600)"
    )
    child = started(ChildSpec("talker", python(code), env={**os.environ, "PYTHONUNBUFFERED": "1"}))
    wait_until(lambda: len(recorder.lines) == 2, "two lines")
    assert sorted(recorder.lines) == [("talker", "bar 2"), ("talker", "out")]
    assert sorted(child.tail) == ["bar 2", "out"]


def test_a_crashed_child_is_restarted_and_the_user_is_told(
    started: Callable[[ChildSpec], Child], recorder: Recorder, quick_backoff: None
) -> None:
    child = started(ChildSpec("sleeper", python("import time; time.sleep(600)")))
    wait_until(lambda: child.pid is not None, "a first process")
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: child.pid not in (None, first), "a second process")
    assert recorder.announcements == ["sleeper ended (killed by SIGKILL); restarting it in 0.01 s"]
    assert child.crashes == 1


def test_a_restarted_child_says_when_it_is_ready_again_and_how_it_had_ended(
    started: Callable[[ChildSpec], Child], recorder: Recorder, quick_backoff: None
) -> None:
    code = python("import time; print('it is ready', flush=True); time.sleep(600)")
    child = started(ChildSpec("engine", code, ready_line=re.compile("is ready$")))
    wait_until(lambda: child.is_ready, "a first start")
    assert (child.restarts, child.last_exit, recorder.announcements) == (0, None, [])
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: child.restarts == 1 and child.is_ready, "a second start")
    assert re.fullmatch(r"engine is ready again, after \d+\.\d s", recorder.announcements[-1])
    assert (child.last_exit, child.restarts_within(60)) == ("killed by SIGKILL", 1)
    assert child.last_exit_at is not None
    assert child.last_exit_at <= child.since


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "print('[core] ValueError: no port'); print('later'); raise SystemExit(1)",
            ": ValueError: no port",
        ),
        ("print('first'); print('the last word'); raise SystemExit(1)", ": the last word"),
        ("raise SystemExit(1)", ""),
        ("import os; print('at work', flush=True); os.kill(os.getpid(), 9)", ""),
        ("print('ValueError: no port'); print('is ready'); raise SystemExit(1)", ""),
    ],
    ids=["an error", "no error", "silent", "killed", "after its start"],
)
def test_a_child_that_ends_while_it_starts_has_its_last_sentence_shown(
    started: Callable[[ChildSpec], Child],
    recorder: Recorder,
    quick_backoff: None,
    code: str,
    said: str,
) -> None:
    child = started(
        ChildSpec(
            "child",
            python(code),
            max_fast_crashes=1,
            ready_line=re.compile("is ready$"),
            telling=re.compile(r"\w+Error: "),
        )
    )
    wait_until(lambda: child.gave_up is not None, "giving up")
    first, last = recorder.announcements[0], recorder.announcements[-1]
    assert re.fullmatch(rf"child ended \([\w ]+\); restarting it in 0.01 s{re.escape(said)}", first)
    assert last.endswith("not restarted: 2 times in a row")


HOPELESS: dict[str, Any] = {
    "ready_line": re.compile("is ready$"),
    "hopeless": lambda log: "no memory" if "oom" in log else None,
}


@pytest.mark.parametrize(
    ("code", "spec", "said"),
    [
        (
            "raise SystemExit(7)",
            {"max_fast_crashes": 3},
            [
                *(f"exit code 7); restarting it in {delay} s" for delay in (0.01, 0.02, 0.04)),
                "exit code 7); not restarted: 4 times in a row",
            ],
        ),
        (
            "print('oom'); raise SystemExit(1)",
            HOPELESS,
            ["exit code 1); not restarted: no memory"],
        ),
        ("raise SystemExit(2)", {}, ["exit code 2); not restarted: its arguments are wrong"]),
    ],
    ids=["after longer and longer waits", "at once where it is hopeless", "with wrong arguments"],
)
def test_a_child_that_fails_is_given_up(
    started: Callable[[ChildSpec], Child],
    recorder: Recorder,
    quick_backoff: None,
    code: str,
    spec: dict[str, Any],
    said: list[str],
) -> None:
    child = started(ChildSpec("child", python(code), **spec))
    wait_until(lambda: child.gave_up is not None, "giving up")
    assert recorder.announcements == [f"child ended ({one}" for one in said]
    assert (child.gave_up, child.crashes) == (recorder.announcements[-1], len(said))


def test_a_child_that_was_ready_once_is_restarted_whatever_its_log_says(
    started: Callable[[ChildSpec], Child], recorder: Recorder, quick_backoff: None
) -> None:
    child = started(
        ChildSpec(
            "child", python("print('is ready'); print('oom'); raise SystemExit(1)"), **HOPELESS
        )
    )
    wait_until(lambda: child.gave_up is not None, "giving up")
    assert str(child.gave_up).endswith("6 times in a row")


@pytest.mark.parametrize(("word", "times"), [("loading", 2), ("is ready", 3)])
def test_a_slow_start_that_fails_counts_as_a_fast_crash(
    started: Callable[[ChildSpec], Child],
    monkeypatch: pytest.MonkeyPatch,
    quick_backoff: None,
    word: str,
    times: int,
) -> None:
    """What counts is how long the child worked, not how long it took to start."""
    monkeypatch.setattr(processes, "STEADY_S", 0.2)
    code = f"import sys, time; print({word!r}, flush=True); time.sleep(1.5); sys.exit(1)"
    child = started(
        ChildSpec("child", python(code), ready_line=HOPELESS["ready_line"], max_fast_crashes=1)
    )
    if word == "loading":
        wait_until(lambda: child.gave_up is not None, "giving up")
    wait_until(lambda: child.crashes >= times, "crashes")
    assert (child.gave_up is not None) == (word == "loading")


def test_a_child_that_never_got_ready_may_be_given_up_sooner(
    started: Callable[[ChildSpec], Child], quick_backoff: None
) -> None:
    spec: dict[str, Any] = {
        "ready_line": HOPELESS["ready_line"],
        "max_fast_crashes": 3,
        "max_failed_starts": 1,
    }
    never, once = (
        started(ChildSpec("child", python(f"print({word!r}); raise SystemExit(1)"), **spec))
        for word in ("loading", "is ready")
    )
    wait_until(lambda: never.gave_up and once.gave_up, "giving up")
    assert (never.crashes, once.crashes) == (2, 4)


def test_a_command_that_does_not_exist_says_so_in_the_log(
    started: Callable[[ChildSpec], Child], recorder: Recorder, quick_backoff: None
) -> None:
    child = started(ChildSpec("missing", ["/no/such/command"], max_fast_crashes=0))
    wait_until(lambda: child.gave_up is not None, "giving up")
    assert "/no/such/command could not be started" in child.tail[0]
    assert "No such file" in child.tail[0]


def test_stopping_lets_the_child_end_by_itself(
    started: Callable[[ChildSpec], Child], recorder: Recorder
) -> None:
    code = """
        import os, signal, sys, time
        def end(*_):
            os.write(1, b"bye\\n")  # print may be under way
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        time.sleep(600)
    """
    child = started(ChildSpec("polite", python(code)))
    wait_until(lambda: child.tail == ["ready"], "readiness")
    child.stop()
    assert child.tail == ["ready", "bye"]
    assert child.pid is None
    assert recorder.announcements == []


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace_period(
    started: Callable[[ChildSpec], Child],
) -> None:
    child = started(ChildSpec("deaf", python(DEAF), grace_s=0.3))
    wait_until(lambda: child.tail == ["deaf"], "readiness")
    pid = child.pid
    began = time.monotonic()
    child.stop()
    assert time.monotonic() - began >= 0.3
    assert not is_running(pid)


def test_asking_twice_kills_at_once(started: Callable[[ChildSpec], Child]) -> None:
    child = started(ChildSpec("deaf", python(DEAF), grace_s=1000))  # beyond any test's time
    wait_until(lambda: child.tail == ["deaf"], "readiness")
    pid = child.pid
    child.request_stop()
    time.sleep(0.1)
    child.request_stop()
    child.wait_stopped()
    assert not is_running(pid)


def test_stopping_ends_grandchildren_too(
    started: Callable[[ChildSpec], Child], tmp_path: Path
) -> None:
    child = started(ChildSpec("parent", python(WITH_GRANDCHILD, str(tmp_path / "pids"))))
    wait_until((tmp_path / "pids").exists, "both processes")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    child.stop()
    assert not any(is_running(pid) for pid in pids)


def test_a_crash_takes_the_grandchildren_along_before_the_restart(
    started: Callable[[ChildSpec], Child], tmp_path: Path, quick_backoff: None
) -> None:
    child = started(ChildSpec("parent", python(WITH_GRANDCHILD, str(tmp_path / "pids"))))
    wait_until((tmp_path / "pids").exists, "both processes")
    parent, grandchild = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: child.pid not in (None, parent), "the restart")
    assert not is_running(grandchild)


def test_a_killed_guard_takes_its_child_along(
    started: Callable[[ChildSpec], Child], quick_backoff: None
) -> None:
    child = started(ChildSpec("guarded", python("import time; time.sleep(600)")))
    wait_until(lambda: child.pid is not None, "a first process")
    first = child.pid
    guard = psutil.Process(first).parent()
    assert guard is not None
    guard.kill()
    wait_until(lambda: child.pid not in (None, first), "the restart")
    wait_until(lambda: not is_running(first), "the first one's end")


def test_nothing_is_left_when_the_supervisor_itself_is_killed(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    supervisor = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                import sys, time
                from pathlib import Path
                sys.path.insert(0, {str(Path(processes.__file__).parents[2])!r})
                from cli.supervise.processes import Child, ChildSpec
                spec = ChildSpec(
                    "parent",
                    [sys.executable, "-S", "-c", {WITH_GRANDCHILD!r}, {str(tmp_path / "pids")!r}],
                    orphan_grace_s=0.5,
                    remove_when_orphaned=Path({str(temporary)!r}),
                )
                Child(spec, print, print).start()
                time.sleep(600)
            """),
        ]
    )
    try:
        wait_until((tmp_path / "pids").exists, "both processes")
    finally:
        supervisor.kill()
        supervisor.wait()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of both")
    wait_until(lambda: not temporary.exists(), "the removal of the temporary directory")


def test_a_child_that_was_never_started_can_be_stopped(recorder: Recorder) -> None:
    child = Child(ChildSpec("idle", python("pass")), recorder.on_line, recorder.announce)
    child.stop()
    assert (child.pid, child.gave_up, recorder.announcements) == (None, None, [])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (1, "exit code 1"),
        (137, "killed by SIGKILL"),
        (-9, "killed by SIGKILL"),
        (255, "exit code 255"),
    ],
)
def test_exit_codes_are_put_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
