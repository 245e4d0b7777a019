"""Signals for commands that supervise child processes in the foreground."""

import os
import signal
from collections.abc import Iterator

import pytest

from cli.supervise.foreground import STOP_SIGNALS, hurry_on_signals, interrupted_by


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
