"""Engines' metrics, each read by itself: what one that hangs costs."""

import asyncio

import pytest

from api.node_metrics import engines
from api.node_metrics.engines import EngineReadings
from api.node_metrics.fetch import FetchError
from poc_core.records import WorkerRecord
from tests.harness.samples import Clock, worker_record
from tests.vllm_metrics import metrics_text

DEADLINE_S = 30.0


class Engines:
    """Answer while they are let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hung: set[str] = set()
        self.gone: set[str] = set()
        self.go_on = asyncio.Event()

    async def ask(self, worker: WorkerRecord) -> str:
        self.asked.append(worker.id)
        if worker.id in self.gone:
            raise FetchError("refused")
        if worker.id in self.hung:
            await self.go_on.wait()
        return metrics_text()


@pytest.fixture(autouse=True)
def soon_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that hangs is: others are done before the event loop looks at its clock."""
    monkeypatch.setattr(engines, "DEADLINE_S", 0.1)


@pytest.fixture
def served() -> Engines:
    return Engines()


@pytest.fixture
def readings(served: Engines, clock: Clock) -> EngineReadings:
    return EngineReadings(served.ask, clock)


BOTH = [worker_record("a"), worker_record("b")]


async def times(readings: EngineReadings) -> dict[str, float]:
    found = await asyncio.wait_for(readings.read(BOTH), DEADLINE_S)
    return {worker_id: reading.at for worker_id, reading in found.items()}


async def test_the_time_of_an_engine_that_hangs_stands_still_and_the_others_goes_on(
    served: Engines, readings: EngineReadings, clock: Clock
) -> None:
    began = clock.now
    assert await times(readings) == {"a": began, "b": began}
    served.hung.add("b")
    for _ in range(3):
        clock.now += 10
        assert await times(readings) == {"a": clock.now, "b": began}
    # The second reading goes on for as long as it takes, and nobody waits for it.
    assert served.asked.count("b") == 2
    readings.close()


async def test_an_engine_that_was_late_is_not_waited_for_again(
    served: Engines, readings: EngineReadings, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.hung.add("b")
    await times(readings)
    # Waiting for the hung engine now would take that long.
    monkeypatch.setattr(engines, "DEADLINE_S", 2 * DEADLINE_S)
    await times(readings)
    readings.close()


async def test_an_engine_that_goes_on_is_told_anew(
    served: Engines, readings: EngineReadings, clock: Clock
) -> None:
    served.hung.add("b")
    await times(readings)
    served.hung.clear()
    served.go_on.set()
    clock.now += 10
    while (await times(readings)).get("b") != clock.now:
        await asyncio.sleep(0)
    clock.now += 10
    assert await times(readings) == {"a": clock.now, "b": clock.now}


async def test_an_engine_that_refuses_is_told_as_it_was(
    served: Engines, readings: EngineReadings, clock: Clock
) -> None:
    began = clock.now
    await times(readings)
    served.gone.add("b")
    clock.now += 10
    assert await times(readings) == {"a": clock.now, "b": began}


async def test_an_engine_that_is_gone_is_forgotten(
    served: Engines, readings: EngineReadings
) -> None:
    await times(readings)
    assert (await readings.read([])) == {}
    served.gone.add("b")
    assert (await times(readings)).keys() == {"a"}
