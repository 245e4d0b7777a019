"""What waits for receivers: payloads that stay what they are until they are delivered."""

import random
from typing import Any

import pytest

from poc_core.fields import MAX_NONCE
from poc_core.records import RoundRecord, RoundState
from poc_core.state.outbox import LAST_BACKOFF_S, Delivery, Outbox
from tests.harness.outbox import URL, Box, content, nonces_of
from tests.harness.samples import DISTANCE_SPEC, K_DIM, complete_lease, known
from tests.harness.stored import n_outboxes

pytestmark = pytest.mark.usefixtures("a_worker")


def test_a_payload_of_artifacts_is_what_the_protocol_says(box: Box, waiting: RoundRecord) -> None:
    delivery = box.take(waiting.round_id)
    assert delivery.url == f"{URL}/generated"
    assert content(delivery) == {
        "public_key": "key",
        "block_hash": "block",
        "block_height": 7,
        "node_id": 0,
        "artifacts": [{"nonce": nonce, "vector_b64": f"v{nonce}"} for nonce in range(4)],
        "encoding": {"dtype": "f16", "k_dim": K_DIM, "endian": "le"},
        "payload_id": f"{waiting.round_id}-0",
    }


def test_a_payload_of_distances_is_what_the_protocol_says(box: Box) -> None:
    record = box.start(spec=DISTANCE_SPEC, terms={"r_target": 1.4})
    lease = box.lease(record, 3)
    complete_lease(box.rounds, lease, "w1", [1.25, 1.5, 1.375])
    box.interval_passes()
    assert content(box.take(record.round_id)) == {
        "public_key": "key",
        "block_hash": "block",
        "block_height": 7,
        "node_id": 0,
        "r_target": 1.4,
        "nonces": [0, 2],
        "dist": [1.25, 1.375],
        "payload_id": f"{record.round_id}-0",
    }


def test_a_slash_at_the_urls_end_does_no_harm(box: Box) -> None:
    record = box.start(url=URL + "/")
    box.compute(record)
    box.interval_passes()
    assert box.take(record.round_id).url == f"{URL}/generated"


def test_the_largest_nonces_keep_their_last_digit(box: Box) -> None:
    record = box.start(node_id=MAX_NONCE - 2**62, node_count=2**62)
    box.compute(record)
    box.interval_passes()
    assert nonces_of(box.take(record.round_id)) == [2**62 - 1, MAX_NONCE]


def test_payloads_come_in_order_and_hold_at_most_callback_max_artifacts(
    box: Box, waiting: RoundRecord
) -> None:
    for places in [4] * 5 + [25]:
        box.compute(waiting, places)
    taken = box.drain(waiting.round_id, box.interval_passes)
    payloads = [nonces_of(delivery) for delivery in taken]
    assert payloads[:3] == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    assert [nonce for payload in payloads for nonce in payload] == list(range(49))
    assert max(map(len, payloads)) <= 10


def test_a_payload_stays_the_same_over_failures_whatever_is_added(
    box: Box, waiting: RoundRecord
) -> None:
    bodies = set()
    for _ in range(5):
        delivery = box.take(waiting.round_id)
        bodies.add(delivery.body)
        box.outbox.failed(delivery, "500")
        box.compute(waiting)
        box.clock.now += LAST_BACKOFF_S
    assert len(bodies) == 1


def test_a_payload_stays_the_same_when_its_courier_died(box: Box, waiting: RoundRecord) -> None:
    died_with = box.take(waiting.round_id)
    box.compute(waiting)
    box.clock.now += box.outbox.lock_s
    assert box.take(waiting.round_id).body == died_with.body


def test_a_lock_that_ended_before_the_entries_were_read_gives_no_payload(
    box: Box, waiting: RoundRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock: Any = box.outbox._take  # noqa: SLF001

    def lock_and_pause(*given: Any) -> Any:
        found = lock(*given)
        box.compute(waiting)
        box.clock.now += box.outbox.lock_s
        other = Outbox(box.redis, box.settings, box.clock)
        assert other.delivered(known(other.take(waiting.round_id)))
        return found

    monkeypatch.setattr(box.outbox, "_take", lock_and_pause)
    assert box.outbox.take(waiting.round_id) is None


@pytest.mark.parametrize("is_dropped", [False, True], ids=["delivered", "dropped"])
def test_the_end_of_a_payload_removes_it_alone_and_the_next_has_the_next_number(
    box: Box, waiting: RoundRecord, is_dropped: bool
) -> None:
    first = box.take(waiting.round_id)
    box.compute(waiting)
    assert box.outbox.dropped(first, "answered 500") if is_dropped else box.outbox.delivered(first)
    box.interval_passes()
    second = box.take(waiting.round_id)
    assert (nonces_of(second), second.failures) == ([4, 5, 6, 7], 0)
    assert second.payload_id == f"{waiting.round_id}-1"


def test_the_status_counts_what_waits_and_what_was_delivered(
    box: Box, waiting: RoundRecord
) -> None:
    delivery = box.take(waiting.round_id)
    box.compute(waiting, places=3)
    box.outbox.delivered(delivery)
    status = box.status(waiting.round_id)
    assert (status.waiting, status.delivered, status.dropped, status.failures) == (3, 4, 0, 0)


def test_an_unknown_outbox_has_nothing(box: Box) -> None:
    assert box.outbox.take("0" * 32) is None
    assert box.status("0" * 32).waiting == 0


# Whatever happens, and in whatever order.


class FickleReceiver:
    """Takes, refuses, takes without an answer that arrives, finds too large. It remembers the
    ids.
    """

    def __init__(self, outbox: Outbox, rng: random.Random) -> None:
        self._outbox = outbox
        self._rng = rng
        self._seen: dict[str, bytes] = {}
        self._too_large: set[str] = set()
        self.taken: dict[str, list[int]] = {}  # by id, in the order of their arrival

    def answer(self, delivery: Delivery) -> None:
        """One try of a courier, which may die before its end, or have lost its lock."""
        assert self._seen.setdefault(delivery.payload_id, delivery.body) == delivery.body
        mood = self._rng.choice(
            ["takes", "takes", "takes", "answer lost", "refuses", "too large", "courier dies"]
        )
        if mood == "too large" and delivery.payload_id not in self.taken:
            self._too_large.add(delivery.payload_id)
        if delivery.payload_id in self._too_large:
            if not self._outbox.halved(delivery, "answered 413"):
                self._too_large.remove(delivery.payload_id)  # or it would never take it
                self._outbox.failed(delivery, "answered 413")
        elif mood == "refuses":
            self._outbox.failed(delivery, "answered 500")
        else:
            self.taken.setdefault(delivery.payload_id, nonces_of(delivery))
            if mood == "answer lost":
                self._outbox.failed(delivery, "no answer")
            elif mood != "courier dies":
                self._outbox.delivered(delivery)


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_events_loses_nothing_doubles_nothing_and_keeps_the_order(
    box: Box, seed: int
) -> None:
    rng = random.Random(seed)
    receiver = FickleReceiver(box.outbox, rng)
    record = box.start()
    n_computed = 0
    held: list[Delivery] = []  # by couriers, some of which hang until their lock is lost
    for _ in range(80):
        event = rng.choice(["compute", "take", "take", "answer", "answer", "time passes"])
        if event == "compute":
            n_computed += len(box.compute(record, rng.randint(1, 25)).nonces)
        elif event == "take":
            held += filter(None, [box.outbox.take(record.round_id)])
        elif event == "answer" and held:
            receiver.answer(held.pop(rng.randrange(len(held))))
        elif event == "time passes":
            box.clock.now += rng.choice(
                [0.5, box.settings.callback_interval_sec, box.outbox.lock_s]
            )
    box.rounds.switch(record, RoundState.STOPPED)
    while n_outboxes(box.redis):
        box.clock.now += LAST_BACKOFF_S
        for delivery in [*held, *filter(None, [box.outbox.take(record.round_id)])]:
            receiver.answer(delivery)
        held.clear()
    assert [nonce for nonces in receiver.taken.values() for nonce in nonces] == list(
        range(n_computed)
    )
    status = box.status(record.round_id)
    assert (status.waiting, status.waiting_bytes, status.delivered) == (0, 0, n_computed)
