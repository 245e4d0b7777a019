"""A host tells of its machine, whatever Redis and the driver do."""

import threading
from collections.abc import Iterator

import pytest
from redis.exceptions import ConnectionError

from cli.machine import sensors
from cli.supervise import machine_reporter
from cli.supervise.machine_reporter import MachineReporter
from poc_core.machine_figures import MachineFigures
from tests.harness.waiting import wait_until


class Told:
    """Stands in for the store: what it was told, and whether Redis is away."""

    def __init__(self) -> None:
        self.figures: list[MachineFigures] = []
        self.n_tries = 0
        self.is_away = False

    def store_machine(self, host_id: str, figures: MachineFigures) -> None:
        assert host_id == "h1-7"
        self.n_tries += 1
        if self.is_away:
            raise ConnectionError("away")
        self.figures.append(figures)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def teller(
    told: Told, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[MachineReporter]:
    monkeypatch.setattr(machine_reporter, "TELL_S", 0.01)
    before = set(threading.enumerate())
    teller = MachineReporter(told, "h1-7", "h1", said.append)  # type: ignore[arg-type]
    yield teller
    teller.stop()
    # What is patched is put back only now.
    for thread in set(threading.enumerate()) - before:
        if thread.name == "machine-teller":
            thread.join(60)
            assert not thread.is_alive()


def test_it_tells_again_and_again_also_after_redis_was_away(
    teller: MachineReporter, told: Told
) -> None:
    told.is_away = True
    teller.start()
    wait_until(lambda: told.n_tries >= 2)
    told.is_away = False
    wait_until(lambda: len(told.figures) >= 2)
    assert told.figures[0].host == "h1"
    assert told.figures[0].sensors["memory_used_bytes"] > 0


def test_a_sensor_that_breaks_ends_the_telling_alone_and_says_so(
    teller: MachineReporter, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensors.Sensors, "read", lambda _: 1 / 0)
    teller.start()
    wait_until(lambda: said)
    assert said == [
        "the sensors of this machine are no longer reported: ZeroDivisionError('division by zero')"
    ]


def test_a_driver_that_hangs_does_not_hold_up_the_end(
    teller: MachineReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end = threading.Event(), threading.Event()

    def hangs(_: object) -> None:
        begun.set()
        end.wait(60)

    monkeypatch.setattr(sensors.Sensors, "read", hangs)
    teller.start()
    begun.wait(60)
    teller.stop()
    assert not end.is_set()
    end.set()
