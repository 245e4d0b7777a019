"""Rounds on a real stack: what receivers get, whatever breaks on the way. Synthetic engines:
only the way counts.
"""

import itertools
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from poc_core.settings import Settings
from tests.peers.receiver import Receiver, gaps_and_repeats
from tests.stacks.own_redis import write_before_answers
from tests.stacks.round_client import (
    FAST,
    StackClient,
    another_worker,
    assert_complete,
    forget_callbacks,
    given_back,
    leave_nothing,
    round_body,
    running_stack,
)
from workers.work import TURN_S

pytestmark = pytest.mark.integration

STEP_S = 0.05  # of a synthetic micro-batch
IN_HAND = 2 * 2 * 32  # nonces at most: two leases of each of two workers
TASK_S = TURN_S + 0.5  # of a task of a round, and a little more
LOCK_S = Settings(worker_ttl_s=int(FAST["POC_WORKER_TTL_S"])).delivery_lock_s
MOST_CALLBACKS = 16  # of one client, where 64 may wait
OUTBOX_BYTES = 600_000  # some 20 s: beyond what a receiver misses that is away for seconds


@pytest.fixture(scope="module")
def client() -> Iterator[StackClient]:
    with running_stack({"POC_OUTBOX_MAX_BYTES": str(OUTBOX_BYTES)}) as client:
        yield client


@pytest.fixture
def receiver(client: StackClient) -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        leave_nothing(client)


@pytest.fixture(scope="class")
def after_11_s(client: StackClient) -> Iterator[Receiver]:
    """Of a round that goes on, and whose rates are those of a full window."""
    with Receiver() as receiver:
        client.start(receiver)
        try:
            client.wait(lambda: client.stats()["elapsed_seconds"] > 11, 300, "11 s of a round")
            client.wait(lambda: len(receiver.taken()) >= 7, 300, "seven payloads")
            yield receiver
        finally:
            leave_nothing(client)


def finish(client: StackClient, receiver: Receiver, expected: range | None = None) -> None:
    client.stop()
    client.wait_delivered()
    assert_complete(client, receiver, expected)


class TestUndisturbed:
    def test_payloads_come_every_interval(self, after_11_s: Receiver) -> None:
        arrivals = [payload.at for payload in after_11_s.taken()]
        between = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        assert len(between) >= 6
        assert all(seconds >= 0.9 for seconds in between), between

    def test_rates_are_those_of_two_workers(
        self, client: StackClient, after_11_s: Receiver
    ) -> None:
        stats = client.stats()
        bare, so_far = 2 * 32 / STEP_S, stats["total_processed"] / stats["elapsed_seconds"]
        assert 0 < stats["nonces_per_second"] <= 1.5 * bare
        assert stats["nonces_per_second_of_round"] == pytest.approx(so_far, rel=0.2)
        assert 0 < so_far <= 1.05 * bare
        of_workers = [worker["nonces_per_second"] for worker in stats["workers"].values()]
        assert len(of_workers) == 2
        assert stats["nonces_per_second"] == pytest.approx(sum(of_workers))

    def test_every_nonce_came_once(self, client: StackClient, after_11_s: Receiver) -> None:
        finish(client, after_11_s)


NODES = [({"node_id": node_id, "node_count": 3}, range(node_id, 2**62, 3)) for node_id in range(3)]
GROUPS = [
    (
        {"node_id": 1, "node_count": 3, "group_id": group_id, "n_groups": 2},
        range(1 + 3 * group_id, 2**62, 6),
    )
    for group_id in range(2)
]


@pytest.mark.parametrize(
    ("parts", "whole"),
    [(NODES, range(2**62)), (GROUPS, range(1, 2**62, 3))],
    ids=["nodes", "groups of a node"],
)
def test_parts_are_disjoint_and_leave_no_gap_between_them(
    client: StackClient, parts: list[tuple[dict[str, int], range]], whole: range
) -> None:
    union: list[int] = []
    lasts = []
    for part, expected in parts:
        with Receiver() as receiver:
            client.start(receiver, **part)
            client.wait_progress(500)
            client.stop()
            in_hand = given_back(client)
            client.wait_delivered()
        missing, wrong = gaps_and_repeats(receiver.nonces(), expected)
        assert (sorted(set(missing) - in_hand), wrong) == ([], [])
        union += [*receiver.nonces(), *in_hand]
        lasts.append(max(receiver.nonces()))
    reached = [nonce for nonce in union if nonce <= min(lasts)]
    assert sorted(reached) == list(whole[: len(reached)])


class TestStop:
    def test_nothing_is_computed_after_it_but_what_was_in_hand(
        self, client: StackClient, receiver: Receiver
    ) -> None:
        client.start(receiver)
        client.wait_progress(500)
        client.stop()
        stopped = client.processed()
        given_back(client)
        assert client.processed() - stopped <= IN_HAND

    def test_what_was_computed_is_still_delivered(
        self, client: StackClient, receiver: Receiver
    ) -> None:
        receiver.status = 503
        client.start(receiver)
        client.wait_progress(1000)
        client.stop()
        given_back(client)
        assert client.stats()["artifacts_waiting"] == client.processed()
        receiver.status = 200
        client.wait_delivered()
        assert_complete(client, receiver)

    def test_jobs_that_waited_for_its_end_are_cancelled_unless_their_client_waits_too(
        self, client: StackClient, receiver: Receiver
    ) -> None:
        client.start(receiver)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(generate, client, wait=True)
            queued = generate(client, wait=False).json()
            client.wait(lambda: client.status()["queued_nonces"] >= 6, 300, "both jobs queued")
            assert client.stop()["cancelled_jobs"] == 1
            assert waiting.result(300).json()["status"] == "completed"
        assert (
            client.http.get(f"/api/v1/pow/generate/{queued['request_id']}").json()["status"]
            == "cancelled"
        )


class TestJobs:
    def test_wait_for_the_validation_phase(self, client: StackClient, receiver: Receiver) -> None:
        client.start(receiver)
        client.wait_progress(100)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(generate, client, wait=True, url=receiver.url)
            client.wait(lambda: client.status()["queued_nonces"] == 3, 300, "the job in the status")
            assert not waiting.done()
            answer = client.http.post("/api/v1/pow/phase/validate", json={})
            assert answer.status_code == 200, answer.text
            result = waiting.result(300)
        assert result.status_code == 200, result.text
        assert [artifact["nonce"] for artifact in result.json()["artifacts"]] == [5, 6, 7]
        client.wait(
            lambda: any("request_id" in p.body for p in receiver.taken()), 300, "the job's callback"
        )

    def test_round_goes_on_after_the_validation_phase(
        self, client: StackClient, receiver: Receiver
    ) -> None:
        client.start(receiver)
        client.wait_progress(300)
        for phase in ("validate", "generate"):
            assert client.http.post(f"/api/v1/pow/phase/{phase}", json={}).status_code == 200
        client.wait_progress(300)
        finish(client, receiver)


class TestReceiver:
    def test_that_answers_500_for_a_while_gets_everything_in_order(
        self, client: StackClient, receiver: Receiver
    ) -> None:
        client.start(receiver)
        client.wait(lambda: len(receiver.taken()) >= 1, 300, "the first payload")
        receiver.status = 500
        client.wait(lambda: len(receiver.refused()) >= 3, 300, "three tries")
        assert len({payload.payload_id for payload in receiver.refused()}) == 1
        stats = client.stats()
        assert "answered 500" in stats["outbox"]["last_error"]
        assert stats["nonces_per_second"] > 0
        receiver.status = 200
        finish(client, receiver)
        assert client.stats()["outbox"]["failures"] == 0

    def test_that_never_takes_pauses_the_round_at_the_limit(
        self, client: StackClient, receiver: Receiver
    ) -> None:
        receiver.status = 500
        # Large vectors fill it soon. Whatever the batch: two workers compute two leases of 32 each.
        client.start(receiver, batch_size=1024, params={"k_dim": 120})
        client.wait(lambda: client.stats()["outbox"]["full"], 300, "a full outbox")
        client.wait_settled()
        stats = client.stats()
        waiting, n_bytes = stats["artifacts_waiting"], stats["outbox"]["bytes"]
        assert OUTBOX_BYTES <= n_bytes < OUTBOX_BYTES + IN_HAND * n_bytes / waiting
        assert waiting == stats["total_processed"]
        assert any("POC_OUTBOX_MAX_BYTES" in line and "ERROR" in line for line in client.lines())
        receiver.status = 200
        client.wait_progress(1000)
        finish(client, receiver)

    def test_is_served_within_seconds_while_callbacks_of_jobs_hang(
        self, client: StackClient, receiver: Receiver
    ) -> None:
        with ExitStack() as exits:
            hanging = [
                exits.enter_context(socket.create_server(("127.0.0.1", 0)))
                for _ in range(MOST_CALLBACKS)
            ]
            for server in hanging:  # connected to, and never answered
                generate(client, wait=False, url=f"http://127.0.0.1:{server.getsockname()[1]}")
            client.wait(lambda: client.status()["queued_nonces"] == 0, 300, "all jobs computed")
            client.wait(lambda: client.status()["callbacks_waiting"] >= MOST_CALLBACKS, 300, "all")
            client.start(receiver)
            client.wait(lambda: len(receiver.taken()) >= 3, 300, "three payloads")
            assert client.status()["callbacks_waiting"] >= MOST_CALLBACKS
            forget_callbacks(client)
            finish(client, receiver)


class TestKilled:
    def test_worker(self, client: StackClient, receiver: Receiver) -> None:
        client.start(receiver)
        client.wait(lambda: len(client.stats()["workers"]) == 2, 300, "both workers at work")
        old = client.kill("cpu0")
        with another_worker(client.stack):
            client.wait_restarted("cpu0", old)
            client.wait(
                lambda: len(client.stats()["workers"]) == 4, 300, "two more workers at work"
            )
            client.wait(lambda: bool(receiver.nonces()), 300, "the first payload")
            until = max(receiver.nonces())
            client.wait(lambda: not missing(receiver, until), 300, "the killed worker's nonces")
        finish(client, receiver)

    def test_api(self, client: StackClient, receiver: Receiver) -> None:
        client.start(receiver)
        client.wait_progress(500)
        before = client.processed()
        old = client.kill("api")
        client.wait_restarted("api", old)
        client.wait(lambda: client.status()["state"] == "GENERATING", 300, "the API's answer")
        assert client.processed() > before
        finish(client, receiver)

    def test_courier(self, client: StackClient, receiver: Receiver) -> None:
        receiver.delay_s = 60  # until it is set to less
        client.start(receiver)
        client.wait(lambda: receiver.n_unanswered > 0, 300, "a delivery under way")
        old = client.kill("courier")
        receiver.delay_s = 0
        client.wait_restarted("courier", old)
        client.wait(
            lambda: len({p.payload_id for p in receiver.taken()}) >= 2,
            LOCK_S + 60,
            "the next payload",
        )
        finish(client, receiver)
        assert [p.payload_id for p in receiver.taken()].count(receiver.taken()[0].payload_id) == 2

    def test_redis(self, client: StackClient, receiver: Receiver) -> None:
        write_before_answers(client.redis_url)
        client.start(receiver)
        client.wait(lambda: len(receiver.taken()) >= 2, 300, "two payloads")
        before, engines = client.processed(), client.stack.worker_pids()
        old = client.kill("redis")
        killed = time.monotonic()
        client.wait_restarted("redis", old)
        client.wait(
            lambda: client.processed() >= before, 300, "a Redis that knows what was acknowledged"
        )
        client.wait_progress(500)
        n = len(receiver.taken())
        client.wait(lambda: len(receiver.taken()) > n, 300, "the next payload")
        time.sleep(
            max(0.0, killed + TASK_S - time.monotonic())
        )  # tasks end that came over the lost connection
        client.wait_progress(500)
        assert client.stack.worker_pids() == engines, (
            "an engine was lost because Redis was restarted"
        )
        finish(client, receiver)


def missing(receiver: Receiver, until: int) -> set[int]:
    return set(range(until)).difference(receiver.nonces())


def generate(client: StackClient, **changes: Any) -> httpx.Response:
    body = round_body(None, nonces=[5, 6, 7], **changes)
    return client.http.post("/api/v1/pow/generate", json=body, timeout=300)
