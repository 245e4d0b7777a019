"""When an engine is said to hang."""

import pytest

from poc_core.settings import Settings
from tests.harness.samples import Clock, known
from workers.engines.base import Pulse
from workers.housekeeping import Watchdog

HUNG_AFTER_S = Settings().engine_hung_s
LOOK_S = Settings().heartbeat_s
# Seconds for which the network's broker lets an engine's steps stand still while requests run.
BROKER_S = 120.0


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(HUNG_AFTER_S, longest_look_s=2 * LOOK_S, clock=clock)


def seconds_until_hung(
    watchdog: Watchdog, clock: Clock, pulse: Pulse, most_s: float = 10 * HUNG_AFTER_S
) -> float | None:
    """Of looks at an engine that tells nothing new; None: it never was."""
    watchdog.is_hung(pulse)
    began = clock.now
    while clock.now - began < most_s:
        clock.now += LOOK_S
        told = Pulse(int(str(pulse.beats)), pulse.waits)  # an equal number, but another object
        if watchdog.is_hung(told):
            return clock.now - began
    return None


def test_an_engine_that_stands_still_while_somebody_waits_hangs(
    watchdog: Watchdog, clock: Clock
) -> None:
    assert seconds_until_hung(watchdog, clock, Pulse(7_000, waits=True)) == HUNG_AFTER_S


def test_an_engine_that_nobody_waits_for_may_stand_still(watchdog: Watchdog, clock: Clock) -> None:
    assert seconds_until_hung(watchdog, clock, Pulse(7, waits=False)) is None


def test_an_engine_that_goes_on_once_in_a_while_is_left_alone(
    watchdog: Watchdog, clock: Clock
) -> None:
    for beats in range(20):
        assert (
            seconds_until_hung(
                watchdog, clock, Pulse(beats, waits=True), most_s=HUNG_AFTER_S - LOOK_S
            )
            is None
        )


def test_the_time_counts_from_when_somebody_began_to_wait(watchdog: Watchdog, clock: Clock) -> None:
    assert (
        seconds_until_hung(watchdog, clock, Pulse(7, waits=False), most_s=HUNG_AFTER_S - LOOK_S)
        is None
    )
    assert seconds_until_hung(watchdog, clock, Pulse(7, waits=True)) == HUNG_AFTER_S


def test_a_process_that_was_itself_stopped_holds_nothing_against_its_engine(
    watchdog: Watchdog, clock: Clock
) -> None:
    watchdog.is_hung(Pulse(7, waits=True))
    clock.now += 10 * HUNG_AFTER_S
    assert not watchdog.is_hung(Pulse(7, waits=True))


def test_a_worker_ends_before_the_broker_restarts_the_node(
    watchdog: Watchdog, clock: Clock
) -> None:
    """Though the engine took its last step just after a look, and the look after the last comes
    late.
    """
    found = known(seconds_until_hung(watchdog, clock, Pulse(7, waits=True)))
    assert found + 3 * LOOK_S < BROKER_S
