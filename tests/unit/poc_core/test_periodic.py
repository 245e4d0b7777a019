"""A thread that takes a step every so often, even if steps fail."""

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from redis.exceptions import ConnectionError, RedisError

from poc_core import periodic
from poc_core.periodic import Periodic
from tests.harness.waiting import wait_until

SOON, NEVER = 0.01, 1000.0


class Steps:
    """Raises what it is told to."""

    def __init__(self) -> None:
        self.n = 0
        self.trouble: Exception | None = None

    def __call__(self) -> None:
        self.n += 1
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], object], float], Periodic]]:
    started: list[Periodic] = []

    def start(step: Callable[[], object], interval_s: float) -> Periodic:
        started.append(Periodic("housework", interval_s, step))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


Start = Callable[[Callable[[], object], float], Periodic]


def test_it_steps_again_and_again_until_it_is_stopped(start: Start, steps: Steps) -> None:
    work = start(steps, SOON)
    wait_until(lambda: steps.n >= 3)
    work.stop()
    n_steps = steps.n
    assert (
        work.is_stopping,
        any(thread.name == "housework" for thread in threading.enumerate()),
    ) == (True, False)
    assert steps.n == n_steps


@pytest.mark.parametrize(
    "trouble", [TypeError("a mistake"), ConnectionError("away"), MemoryError()], ids=repr
)
def test_no_error_ends_it(start: Start, steps: Steps, trouble: Exception) -> None:
    steps.trouble = trouble
    start(steps, SOON)
    wait_until(lambda: steps.n >= 3)


def test_the_same_trouble_is_logged_once_a_minute(
    steps: Steps, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Periodic("housework", NEVER, steps)
    for trouble in (
        TypeError("one"),
        TypeError("one"),
        TypeError("other"),
        None,
        TypeError("other"),
    ):
        steps.trouble = trouble
        work.once()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"housework failed and is repeated: TypeError('{what}')" for what in ("one", "other")
    ]
    monkeypatch.setattr(periodic, "SAID_AGAIN_S", 0.0)
    work.once()
    assert len(caplog.records) == 3


def test_a_mistake_is_logged_with_its_place_and_an_absence_of_redis_in_one_line(
    steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    brokers_own = OSError("the broker's own error")
    brokers_own.__cause__ = ConnectionError("away")
    for trouble in (ConnectionError("away"), brokers_own, KeyError("x")):
        steps.trouble = trouble
        Periodic("housework", NEVER, steps).once()
    assert [record.exc_info is not None for record in caplog.records] == [False, False, True]


def test_an_error_of_redis_is_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    def step() -> None:
        raise RedisError("EVALSHA failed: " + "local KEYS " * 1000 + "\nreturn 1" * 50)

    Periodic("housework", NEVER, step).once()
    (line,) = caplog.text.splitlines()
    assert "EVALSHA failed" in line
    assert len(line) < 400


def test_two_steps_are_never_under_way_at_once(start: Start) -> None:
    began, goes_on = threading.Event(), threading.Event()
    under_way: list[str] = []
    most = 0

    def step() -> None:
        nonlocal most
        under_way.append(threading.current_thread().name)
        most = max(most, len(under_way))
        began.set()
        goes_on.wait(60)
        under_way.pop()

    work = start(step, SOON)
    assert began.wait(60)
    asked = threading.Thread(target=work.once)
    asked.start()
    asked.join(0.2)
    goes_on.set()
    asked.join(60)
    assert most == 1


def test_a_step_may_be_asked_for_soon_without_waiting_for_the_one_under_way(start: Start) -> None:
    began, goes_on = threading.Event(), threading.Event()
    steps: list[str] = []

    def step() -> None:
        steps.append(threading.current_thread().name)
        began.set()
        goes_on.wait(60)

    work = start(step, NEVER)
    work.soon()
    assert began.wait(60)
    work.soon()  # this one too, though a step is under way
    assert len(steps) == 1
    goes_on.set()
    wait_until(lambda: len(steps) == 2)
    assert set(steps) == {"housework"}


def test_one_that_was_never_started_can_be_stopped(steps: Steps) -> None:
    Periodic("housework", NEVER, steps).stop()
    assert steps.n == 0
