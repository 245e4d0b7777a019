"""Who may deliver at the same time: hanging deliveries must not keep back the others."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from poc_core.state.outbox import Due
from workers.courier.courier import (
    HOST_SHARE,
    JOB_PLACES,
    MOST_BYTES,
    RECEIVER_PLACES,
    ROUND_PLACES,
    Places,
)


class Deliveries:
    """Hang until they are let go."""

    def __init__(self) -> None:
        self.under_way: list[str] = []
        self.begun: list[str] = []
        self.places = Places(self.deliver, largest_payload=1000)
        self._ends: dict[str, asyncio.Event] = {}

    async def deliver(self, outbox_id: str) -> None:
        self.under_way.append(outbox_id)
        self.begun.append(outbox_id)
        try:
            await self._ends.setdefault(outbox_id, asyncio.Event()).wait()
        finally:
            self.under_way.remove(outbox_id)

    async def offer(self, *dues: Due) -> None:
        for due in dues:
            self.places.offer(due)
        await settle()

    async def end(self, outbox_id: str) -> None:
        self._ends[outbox_id].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def job(number: int, receiver: str | None = None, size: int = 100) -> Due:
    return Due(f"job{number}", receiver or f"receiver{number}:80", False, size)


def a_round(name: str = "round", receiver: str = "aggregator:80", size: int = 100) -> Due:
    return Due(name, receiver, True, size)


@pytest.fixture
async def deliveries() -> AsyncIterator[Deliveries]:
    deliveries = Deliveries()
    yield deliveries
    await deliveries.places.close(0)


async def test_a_round_has_a_place_while_60_jobs_receivers_hang(deliveries: Deliveries) -> None:
    await deliveries.offer(*(job(number) for number in range(60)))
    assert len(deliveries.under_way) == JOB_PLACES
    await deliveries.offer(a_round())
    assert "round" in deliveries.under_way


async def test_a_receiver_has_few_places_whatever_waits_for_it(deliveries: Deliveries) -> None:
    await deliveries.offer(*(job(number, "hangs:80") for number in range(60)), job(99))
    assert len(deliveries.under_way) == RECEIVER_PLACES + 1
    assert deliveries.under_way[-1] == "job99"


async def test_a_host_has_half_of_the_places_however_many_its_ports(deliveries: Deliveries) -> None:
    await deliveries.offer(*(job(port, f"hangs:{port}") for port in range(1, 61)))
    assert len(deliveries.under_way) == HOST_SHARE * JOB_PLACES
    await deliveries.offer(job(99))
    assert deliveries.under_way[-1] == "job99"


async def test_jobs_leave_a_round_its_places_at_the_same_receiver(deliveries: Deliveries) -> None:
    await deliveries.offer(*(job(number, "aggregator:80") for number in range(10)), a_round())
    assert "round" in deliveries.under_way


async def test_past_rounds_have_no_more_places_than_there_are(deliveries: Deliveries) -> None:
    await deliveries.offer(*(a_round(f"round{n}", f"receiver{n}:80") for n in range(30)))
    assert len(deliveries.under_way) == ROUND_PLACES


async def test_what_waits_follows_in_its_order_when_a_place_is_free(deliveries: Deliveries) -> None:
    await deliveries.offer(*(job(number) for number in range(JOB_PLACES + 2)))
    await deliveries.end("job3")
    assert deliveries.under_way[-1] == f"job{JOB_PLACES}"
    await deliveries.end("job4")
    assert deliveries.under_way[-1] == f"job{JOB_PLACES + 1}"


async def test_what_is_offered_again_is_delivered_by_one_at_a_time(deliveries: Deliveries) -> None:
    for _ in range(3):
        await deliveries.offer(job(1), a_round())
    assert sorted(deliveries.under_way) == ["job1", "round"]
    await deliveries.end("job1")
    # values may have come after the first delivery found no more
    assert deliveries.begun == ["job1", "round", "job1"]


async def test_payloads_under_way_are_bounded_by_their_bytes(deliveries: Deliveries) -> None:
    await deliveries.offer(
        job(1, size=MOST_BYTES * 2),  # alone in its kind it goes, whatever its size
        job(2, size=1),
        a_round(size=10**12),  # its payloads hold at most 1000 of them
    )
    assert sorted(deliveries.under_way) == ["job1", "round"]
    await deliveries.end("job1")
    assert sorted(deliveries.under_way) == ["job2", "round"]


async def test_at_its_end_nothing_begins_and_what_is_under_way_is_waited_for(
    deliveries: Deliveries,
) -> None:
    await deliveries.offer(job(1))
    closing = asyncio.ensure_future(deliveries.places.close(5))
    await settle()
    deliveries.places.offer(job(2))
    assert not closing.done()
    await deliveries.end("job1")
    await closing
    assert deliveries.under_way == []


async def test_what_does_not_end_is_given_up(deliveries: Deliveries) -> None:
    await deliveries.offer(job(1))
    await deliveries.places.close(0.01)
    assert deliveries.under_way == []
