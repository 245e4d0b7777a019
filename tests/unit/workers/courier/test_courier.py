"""The courier, by a receiver's answers, and where Redis or a process goes away meanwhile."""

import asyncio
import ipaddress
import itertools
import json
import logging
import os
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fakeredis
import httpx
import pytest
from redis import Redis

from poc_core import life_signs
from poc_core.records import NewJob, RoundRecord, RoundState
from poc_core.redis_at.url import RedisUrl
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import LAST_BACKOFF_S, Due, Outbox, Receivers
from poc_core.state.parsing import BREAKS_AT, OutboxStatus
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.documents import ROOT
from tests.harness.samples import (
    MODEL,
    REQUEST,
    SPEC,
    Clock,
    complete_batch,
    complete_lease,
    known,
    lease_batch,
    lease_nonces,
    leased,
    round_config,
    worker_record,
)
from tests.harness.stored import outbox_status, spared_receivers
from tests.harness.waiting import wait_until
from workers import patience
from workers.courier import main as main_module
from workers.courier import main as ticker_module
from workers.courier import poster as poster_module
from workers.courier.courier import JOB_PLACES, Courier
from workers.courier.main import NodePorts, Ticker
from workers.courier.poster import UNREACHABLE, Poster

Answer = int | Exception

ADDRESS = "10.0.0.9"


class Receiver:
    """Answers as it is told, 200 when nothing is left to be told, and keeps what it took."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[httpx.Request] = []
        self.taken: list[dict[str, Any]] = []
        self.poster = poster(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        if answer < 300:
            self.taken.append(json.loads(request.content))
        return httpx.Response(answer)

    @property
    def nonces(self) -> list[int]:
        return [artifact["nonce"] for payload in self.taken for artifact in payload["artifacts"]]


def poster(answer: Callable[[httpx.Request], httpx.Response], address: str = ADDRESS) -> Poster:
    """One for which every name is `address`, of the operator's network."""
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Poster(
        client, Settings().callbacks, lookup=lambda name, port: [(0, 0, 0, "", (address, port))]
    )


def deliver(courier: Courier, outbox_id: str) -> None:
    asyncio.run(courier.deliver(outbox_id))


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def receivers(redis: Redis, clock: Clock) -> Receivers:
    return Receivers(redis, clock)


@pytest.fixture
def courier(outbox: Outbox, receivers: Receivers, receiver: Receiver) -> Courier:
    return Courier(outbox, receivers, receiver.poster)


@pytest.fixture
def record(
    rounds: RoundStore, workers: WorkerRegistry, clock: Clock, settings: Settings
) -> RoundRecord:
    """A round of which four artifacts are due."""
    workers.heartbeat(worker_record("w1"))
    started = known(rounds.read(rounds.store(round_config(), RoundState.GENERATING)))
    compute(rounds, started)
    clock.now += settings.callback_interval_sec
    return started


def compute(rounds: RoundStore, record: RoundRecord) -> None:
    lease = leased(lease_nonces(rounds, record, "w1", 4))
    complete_lease(rounds, lease, "w1", [f"v{nonce}" for nonce in lease.nonces])


@dataclass
class Scene:
    """A courier and the one receiver of a round of which four artifacts are due."""

    redis: Redis
    clock: Clock
    rounds: RoundStore
    outbox: Outbox
    courier: Courier
    receiver: Receiver
    record: RoundRecord

    def courier_of(self, poster: Poster, max_retries: int | None = None) -> Courier:
        receivers = Receivers(self.redis, self.clock)
        return Courier(self.outbox, receivers, poster, max_retries=max_retries)

    def deliver(self, outbox_id: str = "", courier: Courier | None = None) -> None:
        deliver(courier or self.courier, outbox_id or self.record.round_id)

    def compute(self) -> None:
        compute(self.rounds, self.record)

    def status(self, outbox_id: str = "") -> OutboxStatus:
        return outbox_status(self.redis, outbox_id or self.record.round_id)


@pytest.fixture
def scene(
    redis: Redis,
    clock: Clock,
    rounds: RoundStore,
    outbox: Outbox,
    courier: Courier,
    receiver: Receiver,
    record: RoundRecord,
) -> Scene:
    return Scene(redis, clock, rounds, outbox, courier, receiver, record)


def test_a_payload_is_posted_as_json_with_its_id(scene: Scene) -> None:
    scene.deliver()
    (request,) = scene.receiver.requests
    assert (request.method, str(request.url)) == ("POST", f"http://{ADDRESS}:9000/poc/generated")
    assert request.headers["Host"] == "receiver:9000"
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["X-Payload-Id"] == scene.receiver.taken[0]["payload_id"]


@pytest.mark.parametrize("status", [200, 201, 204])
def test_a_success_is_a_delivery(scene: Scene, status: int) -> None:
    scene.receiver.answers = [status]
    scene.deliver()
    assert (scene.status().delivered, scene.status().waiting) == (4, 0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (500, "http://receiver:9000/poc/generated answered 500"),
        (302, "http://receiver:9000/poc/generated answered 302"),
        (400, "answered 400"),
        (httpx.ReadTimeout("timed out"), UNREACHABLE),
        (httpx.ConnectError("refused"), UNREACHABLE),
        (httpx.InvalidURL("bad host"), UNREACHABLE),
        (UnicodeError("label empty"), UNREACHABLE),
    ],
    ids=str,
)
def test_a_failure_keeps_the_payload_says_why_and_is_not_tried_again_before_its_wait_is_over(
    scene: Scene, answer: Answer, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene.receiver.answers = [answer]
    for _ in range(2):
        scene.deliver()
    status = scene.status()
    assert (status.waiting, status.delivered, status.failures) == (4, 0, 1)
    assert said in str(status.last_error)
    assert "not delivered (try 1, next in" in caplog.text
    assert len(scene.receiver.requests) == 1


def test_what_retention_took_is_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.redis.delete(
        f"poc:outbox:{scene.record.round_id}", f"poc:outbox:{scene.record.round_id}:entries"
    )
    scene.deliver()
    scene.deliver()
    assert [entry.levelname for entry in caplog.records] == ["ERROR"]
    assert "Retention ended (POC_CALLBACK_RETENTION_SEC" in caplog.text
    assert scene.receiver.requests == []


def test_an_outbox_that_breaks_down_keeps_no_other_from_its_turn(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scene.outbox, "take", lambda _: {"": 0}["a mistake"])
        scene.deliver()
    assert f"could not deliver {scene.record.round_id}" in caplog.text
    assert "KeyError: 'a mistake'" in caplog.text
    scene.deliver()
    assert scene.receiver.requests


def test_a_receiver_that_returns_gets_everything_once_and_in_order(scene: Scene) -> None:
    scene.receiver.answers = [
        500,
        httpx.ReadTimeout("timed out"),
        503,
        httpx.ConnectError("refused"),
    ]
    for _ in range(8):
        scene.deliver()
        scene.compute()
        scene.clock.now += LAST_BACKOFF_S
    scene.deliver()
    assert scene.receiver.nonces == list(range(36))


def test_a_payload_that_was_taken_but_not_answered_comes_again_with_the_same_id(
    scene: Scene,
) -> None:
    scene.receiver.answers = [httpx.ReadTimeout("the answer came too late")]
    scene.deliver()
    scene.clock.now += LAST_BACKOFF_S
    scene.deliver()
    first, second = scene.receiver.requests
    assert first.content == second.content
    assert first.headers["X-Payload-Id"] == second.headers["X-Payload-Id"]


def test_a_restart_between_two_tries_loses_nothing(scene: Scene, settings: Settings) -> None:
    scene.receiver.answers = [500]
    for _ in range(2):
        scene.outbox = Outbox(scene.redis, settings, scene.clock)
        scene.deliver(courier=scene.courier_of(scene.receiver.poster))
        scene.clock.now += LAST_BACKOFF_S
    assert scene.receiver.nonces == [0, 1, 2, 3]


def test_a_courier_that_died_on_the_way_is_replaced(scene: Scene) -> None:
    died_with = scene.outbox.take(scene.record.round_id)
    scene.deliver()
    assert scene.receiver.requests == []
    scene.clock.now += scene.outbox.lock_s
    scene.deliver()
    assert died_with is not None
    assert scene.receiver.taken == [json.loads(died_with.body)]


def test_payloads_that_wait_are_delivered_one_after_the_other(scene: Scene) -> None:
    scene.outbox._settings = scene.outbox._settings.model_copy(update={"callback_max_artifacts": 4})
    for _ in range(5):
        scene.compute()
    scene.rounds.switch(scene.record, RoundState.STOPPED)
    scene.deliver()
    assert [len(payload["artifacts"]) for payload in scene.receiver.taken] == [4] * 6


def test_a_payload_on_a_slow_line_is_not_sent_twice(scene: Scene) -> None:
    answer = scene.receiver.answer

    def slowly(request: httpx.Request) -> httpx.Response:
        for _ in range(5):
            scene.clock.now += scene.outbox.lock_s - 1
            slow.renew_locks()
            assert scene.outbox.take(scene.record.round_id) is None
        return answer(request)

    slow = scene.courier_of(poster(slowly))
    scene.deliver(courier=slow)
    assert (len(scene.receiver.requests), scene.status().delivered) == (1, 4)


def test_tries_do_not_end_by_default(scene: Scene) -> None:
    scene.receiver.answers = [500] * 100
    for _ in range(101):
        scene.deliver()
        scene.clock.now += LAST_BACKOFF_S
    assert scene.receiver.nonces == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("wish", "least_s", "most_s"),
    [("120", 120, 120), ("0", 1, 1), ("86400", 600, 600), (None, 1, 2), ("never", 1, 2)],
)
def test_a_receiver_says_when_the_next_try_comes(
    scene: Scene, wish: str | None, least_s: float, most_s: float
) -> None:
    headers = {"Retry-After": wish} if wish else {}
    asked = poster(lambda _: httpx.Response(429, headers=headers))
    scene.deliver(courier=scene.courier_of(asked))
    next_at = known(scene.status().next_at)
    assert least_s <= next_at - scene.clock.now <= most_s


def test_410_ends_a_delivery_and_all_that_would_follow(scene: Scene) -> None:
    delivery = known(scene.outbox.take(scene.record.round_id))
    scene.outbox.failed(delivery, "a try before")
    scene.compute()  # waits behind that payload
    scene.clock.now += LAST_BACKOFF_S
    scene.receiver.answers = [410]
    scene.deliver()
    for _ in range(2):
        status = scene.status()
        assert (status.dropped, status.waiting, status.waiting_bytes) == (8, 0, 0)
        assert "answered 410" in str(status.last_error)
        scene.compute()
        scene.clock.now += LAST_BACKOFF_S
        assert scene.outbox.announce() == []
        scene.deliver()
    assert len(scene.receiver.requests) == 1


def test_after_max_retries_the_payload_is_dropped_and_the_next_one_delivered(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    courier = scene.courier_of(scene.receiver.poster, max_retries=2)
    scene.receiver.answers = [500, 500]
    for _ in range(3):
        scene.deliver(courier=courier)
        scene.compute()
        scene.clock.now += LAST_BACKOFF_S
    assert scene.receiver.nonces == [4, 5, 6, 7, 8, 9, 10, 11]
    assert scene.status().dropped == 4
    assert "is dropped after 2 tries" in caplog.text


def test_a_delivery_is_remembered_also_when_redis_was_away_at_its_answer(
    scene: Scene, server: fakeredis.FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.01)
    answer = scene.receiver.answer

    def redis_goes(request: httpx.Request) -> httpx.Response:
        server.connected = False
        threading.Timer(0.1, lambda: setattr(server, "connected", True)).start()
        return answer(request)

    scene.deliver(courier=scene.courier_of(poster(redis_goes)))
    assert (scene.status().delivered, len(scene.receiver.requests)) == (4, 1)


def test_a_body_without_end_does_not_hold_the_courier(scene: Scene) -> None:
    read: list[bytes] = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                read.append(b"x" * 1000)
                assert len(read) < 100
                yield read[-1]

    endless = poster(lambda _: httpx.Response(200, stream=Endless()))
    scene.deliver(courier=scene.courier_of(endless))
    assert scene.status().delivered == 4


def test_the_couriers_process_follows_no_redirect(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def redirect(_transport: object, request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(302, headers={"Location": "http://elsewhere/"})

    handlers: list[Callable[[], None]] = []

    def stop_after_a_try() -> None:
        wait_until(lambda: scene.status().failures == 1)
        handlers[0]()

    found = [(0, 0, 0, "", (ADDRESS, 9000))]
    monkeypatch.setattr(poster_module.socket, "getaddrinfo", lambda *_args, **_options: found)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", redirect)
    monkeypatch.setattr(ticker_module, "ALIVE", tmp_path / "alive")
    monkeypatch.setattr(main_module.signal, "signal", lambda _, handler: handlers.append(handler))
    monkeypatch.setattr(main_module, "connect", lambda _: scene.redis)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_after_a_try)
        main_module.run_courier()
        stopping.result()
    assert asked == [f"http://{ADDRESS}:9000/poc/generated"]
    assert (scene.status().delivered, scene.status().waiting) == (0, 4)


def test_deliver_is_harmless_for_an_outbox_that_is_gone(scene: Scene) -> None:
    scene.deliver("0" * 32)
    assert scene.receiver.requests == []


class Offers:
    """Stands in for the courier: keeps what it is offered."""

    def __init__(self) -> None:
        self.all: list[Due] = []
        self.renewed = 0

    def offer(self, due: Due) -> None:
        self.all.append(due)

    def renew_locks(self) -> None:
        self.renewed += 1


@pytest.fixture
def offers() -> Offers:
    return Offers()


@pytest.fixture
def ticker(
    outbox: Outbox, offers: Offers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Ticker]:
    monkeypatch.setattr(ticker_module, "ALIVE", tmp_path / "alive")
    ticker = Ticker(outbox, cast(Courier, offers))
    yield ticker
    ticker.stop()


def tick(ticker: Ticker) -> None:
    """What its thread does each TICK_S."""
    ticker._ticks.once()


@pytest.mark.parametrize("worker_ttl_s", [30, 3600])
def test_a_sign_of_life_comes_twice_in_what_containers_wait_for_one(
    scene: Scene, offers: Offers, monkeypatch: pytest.MonkeyPatch, worker_ttl_s: int
) -> None:
    outbox = Outbox(scene.redis, Settings(worker_ttl_s=worker_ttl_s), Clock())
    compose = (ROOT / "compose.yaml").read_text()
    (minutes,) = re.findall(r"proofline-courier -mmin -(\d+)", compose)
    now = 0.0
    signs: list[float] = [0.0]
    monkeypatch.setattr(ticker_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ticker_module.life_signs, "show", lambda _: signs.append(now))
    ticker = Ticker(outbox, cast(Courier, offers))
    while now < 300:
        now += ticker_module.TICK_S
        tick(ticker)
    signs.append(now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(signs)]
    assert max(gaps) <= 60 * int(minutes) / 2 + ticker_module.TICK_S


def test_what_is_due_is_offered_once(
    ticker: Ticker, offers: Offers, scene: Scene, tmp_path: Path
) -> None:
    for _ in range(3):
        tick(ticker)
    (due,) = offers.all
    assert (due.outbox_id, due.receiver, due.is_round) == (
        scene.record.round_id,
        "receiver:9000",
        True,
    )
    assert due.waiting_bytes > 0
    assert (tmp_path / "alive").exists()


def test_its_sign_of_life_ends_with_it(ticker: Ticker, tmp_path: Path) -> None:
    tick(ticker)
    assert (tmp_path / "alive").exists()
    ticker.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_sign_of_life_of_another_user_keeps_no_lock_from_being_renewed(
    ticker: Ticker, offers: Offers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ticker_module, "ALIVE", tmp_path / "of another" / "alive")
    tick(ticker)
    assert offers.renewed


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_planted_for_its_sign_of_life_is_not_followed(
    ticker: Ticker, offers: Offers, tmp_path: Path, is_there: bool
) -> None:
    target = tmp_path / "of root"
    if is_there:
        target.touch()
        os.utime(target, (1, 1))
    (tmp_path / "alive").symlink_to(target)
    tick(ticker)
    assert offers.renewed
    ticker.stop()
    assert target.exists() == is_there
    assert not is_there or target.stat().st_mtime == 1
    assert (tmp_path / "alive").is_symlink()


def test_its_sign_of_life_is_renewed_in_a_folder_of_its_own(
    ticker: Ticker, offers: Offers, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    alive.mkdir()  # of one that was killed
    os.utime(alive, (1, 1))
    tick(ticker)
    assert alive.stat().st_mtime > 1
    found = subprocess.run(["find", alive, "-mmin", "-1"], capture_output=True, check=True)
    assert found.stdout  # as the health checks of containers look
    ticker.stop()
    life_signs.show(ticker_module.ALIVE)
    assert alive.stat().st_mode & 0o777 == 0o700


def test_what_is_due_again_is_offered_again(ticker: Ticker, offers: Offers, scene: Scene) -> None:
    tick(ticker)
    scene.deliver()
    tick(ticker)
    assert len(offers.all) == 1
    scene.compute()
    scene.clock.now += LAST_BACKOFF_S
    tick(ticker)
    assert len(offers.all) == 2


def test_what_a_courier_that_died_was_offered_is_offered_again(
    ticker: Ticker, offers: Offers, scene: Scene
) -> None:
    tick(ticker)
    assert len(offers.all) == 1
    scene.clock.now += scene.outbox.lock_s
    tick(ticker)
    assert len(offers.all) == 2


def test_the_ticker_outlives_a_redis_that_is_away(
    ticker: Ticker,
    offers: Offers,
    scene: Scene,
    server: fakeredis.FakeServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    server.connected = False
    tick(ticker)
    assert "courier-ticker failed and is repeated" in caplog.text
    server.connected = True
    tick(ticker)
    assert offers.all


def test_the_ticker_outlives_a_mistake(
    ticker: Ticker, offers: Offers, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scene.outbox, "announce", lambda _: {"": 0}["a mistake"])
        tick(ticker)
    tick(ticker)
    assert offers.all


# What one receiver cannot do to the others.


def finished_job(jobs: JobStore, url: str, n_nonces: int = 1) -> str:
    request = REQUEST.model_copy(update={"url": url})
    job_id = jobs.create(NewJob(MODEL, SPEC, request, list(range(n_nonces)), n_nonces))
    leased(lease_batch(jobs, job_id, 0, "w1"))
    complete_batch(jobs, job_id, 0, ["A" * 32] * n_nonces)
    assert jobs.finish(job_id)
    return job_id


def test_410_ends_a_jobs_callback(
    jobs: JobStore, courier: Courier, receiver: Receiver, outbox: Outbox, redis: Redis
) -> None:
    job_id = finished_job(jobs, "http://receiver:9000")
    receiver.answers = [410]
    deliver(courier, job_id)
    deliver(courier, job_id)
    assert len(receiver.requests) == 1
    assert (outbox.n_jobs(), outbox_status(redis, job_id).dropped) == (0, 1)
    assert int(redis.get("poc:outbox:job_bytes") or 0) == 0


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


def test_a_receiver_that_answers_413_gets_the_same_in_halves(scene: Scene) -> None:
    taken: list[dict[str, Any]] = []

    def at_most_three(request: httpx.Request) -> httpx.Response:
        payload = json.loads(request.content)
        if len(payload["artifacts"]) > 3:
            return httpx.Response(413)
        taken.append(payload)
        return httpx.Response(200)

    for _ in range(3):
        scene.compute()
    scene.rounds.switch(scene.record, RoundState.STOPPED)
    scene.deliver(courier=scene.courier_of(poster(at_most_three)))
    assert [artifact["nonce"] for payload in taken for artifact in payload["artifacts"]] == list(
        range(16)
    )
    assert len({payload["payload_id"] for payload in taken}) == len(taken)
    assert scene.status().failures == 0


def test_a_single_artifact_that_is_answered_413_failed(
    courier: Courier, receiver: Receiver, jobs: JobStore, workers: WorkerRegistry, redis: Redis
) -> None:
    workers.heartbeat(worker_record("w1"))
    job_id = finished_job(jobs, "http://receiver:9000")
    receiver.answers = [413]
    deliver(courier, job_id)
    status = outbox_status(redis, job_id)
    assert (status.waiting, status.failures) == (1, 1)
    assert "answered 413" in str(status.last_error)


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


def test_a_callback_urls_secret_is_in_no_log_and_no_error(
    rounds: RoundStore,
    workers: WorkerRegistry,
    courier: Courier,
    receiver: Receiver,
    clock: Clock,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    redis: Redis,
) -> None:
    caplog.set_level(logging.DEBUG)
    workers.heartbeat(worker_record("w1"))
    config = round_config(url="http://user:s3cret@receiver:9000/poc")
    record = known(rounds.read(rounds.store(config, RoundState.GENERATING)))
    compute(rounds, record)
    answers: list[Answer] = [500, httpx.ConnectError("cannot reach user:s3cret@receiver")]
    for answer in answers:
        clock.now += LAST_BACKOFF_S
        receiver.answers = [answer]
        deliver(courier, record.round_id)
        assert "s3cret" not in str(outbox_status(redis, record.round_id).last_error)
    assert "http://***@receiver:9000/poc/generated" in caplog.text
    assert "s3cret" not in caplog.text
    assert all(
        request.headers["Authorization"].startswith("Basic ") for request in receiver.requests
    )


def test_own_ports_are_also_those_of_redis_and_of_apis_elsewhere(
    redis: Redis, workers: WorkerRegistry, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    addresses = {"redis": "172.18.0.2", "sentinel": "172.18.0.9"}
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda host, *_, **__: [(0, 0, 0, "", (addresses[host], 0))],
    )
    ports = NodePorts(frozenset({8000}), workers, RedisUrl.of("redis://redis:6380/0"))
    of_redis = (ipaddress.ip_address("172.18.0.2"), 6380)
    workers.store_api_addresses()
    ports.look()
    of_apis = ports.now() - {8000, of_redis}
    assert of_redis in ports.now()
    assert all(isinstance(one, tuple) and one[1] == 8000 for one in of_apis)
    assert not any(isinstance(one, tuple) and one[0].is_loopback for one in of_apis)
    redis.zadd("poc:api", {"172.18.0.3 8000": clock.now, "nonsense": clock.now})
    ports.look()
    assert (ipaddress.ip_address("172.18.0.3"), 8000) in ports.now()
    sentinels = NodePorts(
        frozenset(), workers, RedisUrl.of("redis+sentinel://sentinel:26379/primary/0")
    )
    sentinels.look()
    at = ipaddress.ip_address("172.18.0.9")
    assert {(at, 26379), (at, 6379)} <= sentinels.now()
    clock.now += 3600
    ports.look()
    assert ports.now() == {8000, of_redis}


def test_each_port_of_an_api_that_has_several_is_the_nodes_own(scene: Scene) -> None:
    workers = WorkerRegistry(scene.redis, Settings(api_port="8080 5000"))
    workers.store_api_addresses()
    found = [one for one in workers.ports() if isinstance(one, tuple)]
    assert {port for _, port in found} == {8080, 5000}
    assert len(found) == 2 * len({address for address, _ in found})


def test_own_ports_are_those_of_the_settings_and_of_workers_that_live(
    workers: WorkerRegistry,
) -> None:
    ports = NodePorts(frozenset({8000}), workers)
    workers.heartbeat(replace(worker_record("w1"), port=9123))
    assert ports.now() == {8000}
    ports.look()
    assert ports.now() == {8000, 9123}
