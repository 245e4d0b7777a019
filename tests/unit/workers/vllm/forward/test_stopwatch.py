"""Which runs a GPU's stopwatch waits for, with events that happen when waited for."""

import pytest
import torch

from workers.vllm.forward.stopwatch import EventStopwatch


class Event:
    """A moment of a stream; `reached` says up to which of them the device is."""

    recorded = 0
    reached = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def query(self) -> bool:
        return Event.reached >= self.at

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.at)

    def elapsed_time(self, later: "Event") -> float:
        assert self.query()
        assert later.query()
        return 1000.0 * (later.at - self.at)


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> EventStopwatch:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(Event, "reached", 0)
    return EventStopwatch()


def run(stopwatch: EventStopwatch, *tag: int) -> None:
    stopwatch.begin()
    stopwatch.end(tag)


def test_two_runs_are_on_the_device_and_a_third_waits_for_the_first(
    stopwatch: EventStopwatch,
) -> None:
    run(stopwatch, 1, 0)
    run(stopwatch, 2, 0)
    assert (stopwatch.take(), Event.reached) == ([], 0)
    run(stopwatch, 3, 0)
    assert (stopwatch.take(), Event.reached) == ([((1, 0), 1.0)], 2)


def test_waiting_for_one_micro_batch_leaves_what_is_behind_it_on_the_device(
    stopwatch: EventStopwatch,
) -> None:
    run(stopwatch, 1, 0)
    run(stopwatch, 2, 0)
    stopwatch.wait(1)
    assert (stopwatch.take(), Event.reached) == ([((1, 0), 1.0)], 2)
    stopwatch.wait(1)
    assert (stopwatch.take(), Event.reached) == ([], 2)


def test_waiting_for_one_waits_for_all_its_runs_and_those_before(stopwatch: EventStopwatch) -> None:
    run(stopwatch, 2, 0)
    run(stopwatch, 1, 0)
    stopwatch.wait(1)
    assert [tag for tag, _seconds in stopwatch.take()] == [(2, 0), (1, 0)]
    run(stopwatch, 1, 1)
    stopwatch.wait()
    assert [tag for tag, _seconds in stopwatch.take()] == [(1, 1)]
