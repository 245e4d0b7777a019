"""A slow receiver does not delay other receivers."""

import asyncio
from typing import cast

import httpx
import pytest
from redis import Redis

from poc_core.records import RoundState
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import LAST_BACKOFF_S, Delivery, Outbox, Receivers
from poc_core.state.parsing import BREAKS_AT
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.courier import ADDRESS, Offers, Scene, compute, finished_job, poster, tick
from tests.harness.samples import Clock, known, round_config, worker_record
from tests.harness.stored import outbox_status, spared_receivers
from tests.harness.waiting import wait_until
from workers.courier.courier import JOB_PLACES, Courier
from workers.courier.main import Ticker
from workers.courier.poster import End, Poster, Result


def test_a_round_is_delivered_while_60_jobs_receivers_hang(
    jobs: JobStore,
    rounds: RoundStore,
    workers: WorkerRegistry,
    outbox: Outbox,
    receivers: Receivers,
    clock: Clock,
    settings: Settings,
    redis: Redis,
) -> None:
    hanging, is_over = 0, False
    hung_when_it_came: list[int] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal hanging
        if request.headers["Host"].startswith("hangs"):
            hanging += 1
            while not is_over:
                await asyncio.sleep(0.01)
        hung_when_it_came.append(hanging)
        return httpx.Response(200)

    workers.heartbeat(worker_record("w1"))
    for number in range(60):
        finished_job(jobs, f"http://hangs{number}:9000")
    record = known(rounds.read(rounds.store(round_config(), RoundState.GENERATING)))
    compute(rounds, record)
    clock.now += settings.callback_interval_sec
    poster = Poster(
        httpx.AsyncClient(transport=httpx.MockTransport(answer)),
        settings.callbacks,
        lookup=lambda name, port: [(0, 0, 0, "", (ADDRESS, port))],
        deadline_s=60,
    )
    courier = Courier(outbox, receivers, poster)
    with courier.running():
        announced = outbox.announce()
        jobs_first = sorted(announced, key=lambda due: due.is_round)
        assert len(jobs_first) == 61
        for due in jobs_first:
            courier.offer(due)
        wait_until(lambda: bool(hung_when_it_came))
        is_over = True
    # Before any of these was given up, after which another would have begun.
    assert hung_when_it_came[0] <= JOB_PLACES
    assert outbox_status(redis, record.round_id).delivered == 4


def test_an_outbox_is_offered_once_however_long_it_waits_for_its_turn(
    ticker: Ticker,
    offers: Offers,
    jobs: JobStore,
    workers: WorkerRegistry,
    outbox: Outbox,
    clock: Clock,
) -> None:
    workers.heartbeat(worker_record("w1"))
    ids = [finished_job(jobs, "http://hangs:9000") for _ in range(60)]
    other = Ticker(outbox, cast(Courier, offers))  # another courier's
    for _ in range(20):
        tick(ticker)
        tick(other)
        clock.now += outbox.lock_s / 50
    assert sorted(due.outbox_id for due in offers.all) == sorted(ids)


def test_a_receiver_that_does_not_answer_is_remembered_and_one_that_refuses_is_not(
    scene: Scene,
) -> None:
    scene.receiver.answers = [*[httpx.ConnectError("refused") for _ in range(BREAKS_AT)], 500]
    for _ in range(BREAKS_AT):
        scene.deliver()
        scene.clock.now += LAST_BACKOFF_S
    spared = spared_receivers(scene.redis)
    assert [one.receiver for one in spared] == ["receiver:9000"]
    scene.deliver(courier=scene.courier_of(poster(scene.receiver.answer, "169.254.169.254")))
    assert len(scene.receiver.requests) == BREAKS_AT  # nothing was sent, so nothing was learned
    assert spared_receivers(scene.redis) == spared
    scene.clock.now += LAST_BACKOFF_S
    scene.deliver()
    assert spared_receivers(scene.redis) == []


def test_at_its_end_the_payload_under_way_is_delivered_and_the_next_one_left(
    scene: Scene, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        answered = scene.receiver.answer(request)
        await ending.wait()
        return answered

    scene.outbox._settings = settings.model_copy(update={"callback_max_artifacts": 4})  # noqa: SLF001
    for _ in range(3):
        scene.compute()
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    poster = Poster(
        client,
        settings.callbacks,
        lookup=lambda name, port: [(0, 0, 0, "", (ADDRESS, port))],
        deadline_s=60,
    )
    courier = scene.courier_of(poster)
    close = courier._places.close  # noqa: SLF001

    async def close_and_answer(timeout_s: float) -> None:
        asyncio.get_running_loop().call_soon(ending.set)
        await close(timeout_s)

    monkeypatch.setattr(courier._places, "close", close_and_answer)  # noqa: SLF001
    with courier.running():
        for due in scene.outbox.announce():
            courier.offer(due)
        wait_until(lambda: scene.receiver.requests)
    assert scene.receiver.nonces == [0, 1, 2, 3]
    scene.deliver()
    assert scene.receiver.nonces == list(range(16))


def test_a_payload_of_many_pieces_arrives_whole() -> None:
    """It is sent in pieces, so that the deadline counts what the receiver's line has taken."""
    arrived: list[bytes] = []

    def take(request: httpx.Request) -> httpx.Response:
        arrived.append(request.content)
        return httpx.Response(200)

    async def one_try(body: bytes) -> Result:
        return await poster(take).post(
            Delivery("id", "token", "http://receiver:9000/", body, "id-0", 0)
        )

    body = bytes(range(251)) * 1000
    assert asyncio.run(one_try(body)).end is End.TAKEN
    assert arrived == [body]
