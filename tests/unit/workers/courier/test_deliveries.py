"""The courier, by a receiver's answers, and where Redis or a process goes away meanwhile."""

import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fakeredis
import httpx
import pytest
from redis import Redis

from poc_core.records import RoundState
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import LAST_BACKOFF_S, Outbox
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.courier import (
    ADDRESS,
    Answer,
    Receiver,
    Scene,
    compute,
    deliver,
    finished_job,
    poster,
)
from tests.harness.samples import Clock, known, round_config, worker_record
from tests.harness.stored import outbox_status
from tests.harness.waiting import wait_until
from workers import patience
from workers.courier import main as main_module
from workers.courier import main as ticker_module
from workers.courier import poster as poster_module
from workers.courier.courier import Courier
from workers.courier.poster import UNREACHABLE


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
    def announced() -> list[str]:
        return [one.outbox_id for one in scene.outbox.announce()]

    died_with = scene.outbox.take(scene.record.round_id)
    assert announced() == []
    scene.deliver()
    assert scene.receiver.requests == []
    scene.clock.now += scene.outbox.lock_s
    assert announced() == [scene.record.round_id]
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
