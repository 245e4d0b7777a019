"""Signals and logs for commands that supervise child processes in the foreground."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO

import pytest

from cli.supervise import processes
from cli.supervise.foreground import (
    STOP_SIGNALS,
    LabelledLog,
    hurry_on_signals,
    interrupted_by,
)
from cli.supervise.processes import Child, ChildSpec
from cli.terminal import note, people_at
from tests.harness.waiting import wait_until


class Full(StringIO):
    """A file on a full disk."""

    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers are the process's own: the test's are taken back."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_hangup_stops_a_command_unless_it_was_started_by_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt), interrupted_by(*STOP_SIGNALS):
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupted_by(*STOP_SIGNALS):
        os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.parametrize("by_nohup", [False, True])
def test_a_hangup_hurries_a_stop_unless_the_command_was_started_by_nohup(by_nohup: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL)
    kills: list[None] = []
    hurry_on_signals(lambda: kills.append(None), "it stops")
    os.kill(os.getpid(), signal.SIGHUP)
    assert len(kills) == (not by_nohup)


def test_a_stop_is_hurried_even_if_the_terminal_is_gone() -> None:
    kills: list[None] = []
    with people_at(Full()):
        hurry_on_signals(lambda: kills.append(None), "it stops")
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(kills) == 1


def test_a_child_logs_on_and_is_restarted_while_nothing_can_be_written_to_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "FIRST_BACKOFF_S", 0.01)
    code = "print('first', flush=True); print('last', flush=True); raise SystemExit(7)"
    spec = ChildSpec("api", [sys.executable, "-S", "-c", code], max_fast_crashes=1)
    with redirect_stderr(Full()) as full, people_at(full):
        child = Child(spec, LabelledLog(), note)
        child.start()
        wait_until(lambda: child.gave_up is not None, "giving up")
        child.stop()
    assert child.gave_up == "api ended (exit code 7); not restarted: 2 times in a row"
    assert child.tail == ["first", "last"] * 2
