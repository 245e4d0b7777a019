"""The outbox: data for a receiver, stored in order in Redis until the receiver has accepted it.

A round's outbox has entries of nonces and values, which are joined into payloads. A job's outbox
has one entry, the complete body. A courier is a process that sends payloads. A payload keeps its
number and contents until it is delivered, so that a receiver can recognize repeats. A payload that
is too large is sent in smaller ones with new numbers.
"""

import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from poc_core.callbacks import receiver_of
from poc_core.errors import ProoflineError
from poc_core.schemes.contract import contract_of
from poc_core.state import entries, keys, scripts
from poc_core.state.client import Store
from poc_core.state.parsing import BREAKS_AT, OutboxStatus, readable

# Least and most seconds between two tries; the pauses double (protocol.md, section 6).
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
_MOST_DOUBLINGS = 10
# Seconds until another payload may be the probe: longer than a try, and a courier may have died.
PROBE_S = 12.0
# Seconds for which a receiver is remembered after its last unanswered try.
_REMEMBERED_S = 600


class Receivers(scripts.BaseStore):
    """The store of receivers (host:port) that do not answer. Even a status 500 is an answer."""

    _silence = scripts.of_store("note_silence")

    def answered(self, receiver: str) -> None:
        """Deletes the receiver's record, because it has answered."""
        with self._redis.pipeline(transaction=False) as pipe:  # a full Redis refuses transactions
            pipe.delete(keys.receiver(receiver))
            pipe.zrem(keys.RECEIVERS, receiver)
            pipe.execute()

    def silent(self, receiver: str) -> int:
        """Counts an unanswered try. Returns the number of unanswered tries in a row."""
        args: list[Any] = [receiver, self._clock(), BREAKS_AT, _REMEMBERED_S]
        args += [backoff_s(failures) for failures in range(_MOST_DOUBLINGS + 1)]
        return int(self._silence([keys.receiver(receiver), keys.RECEIVERS], args))


def backoff_s(failures: int) -> float:
    """Returns a random number of seconds to wait until the next try. `failures`: earlier tries."""
    longest = min(LAST_BACKOFF_S, 2 * FIRST_BACKOFF_S * 2.0 ** min(failures, _MOST_DOUBLINGS))
    return longest * random.uniform(0.5, 1.0)  # jitter: nodes must not retry in sync


# Most outboxes that one call announces as due.
_MOST_DUE = 1000
# Most seconds by which a receiver may delay its next payload (Retry-After).
LONGEST_WAIT_S = 600.0


class OutboxExpiredError(ProoflineError):
    """An outbox expired before all of its data was delivered."""


@dataclass(frozen=True)
class Due:
    """An outbox whose next delivery is due."""

    outbox_id: str
    receiver: str  # host:port
    is_round: bool  # False for a job's outbox
    waiting_bytes: int


@dataclass(frozen=True)
class Delivery:
    """A payload that is locked for one courier. The courier must call Outbox.renew regularly, and
    finally one of Outbox.delivered, failed, halved, dropped and gone.
    """

    outbox_id: str
    token: str
    url: str
    body: bytes
    payload_id: str
    failures: int  # tries before this one
    is_round: bool = True
    n_entries: int = 1  # outbox entries in the payload

    @property
    def receiver(self) -> str:
        return receiver_of(self.url)


class Outbox(Store):
    """The store of outboxes. Only complete.lua and finish_job.lua add entries to an outbox."""

    _take = scripts.of_store("take_delivery")
    _renew = scripts.of_store("renew_delivery")
    _end = scripts.of_store("end_delivery")
    _halve = scripts.of_store("halve_delivery")
    _announce = scripts.of_store("announce_due")
    _drop_failing = scripts.of_store("drop_failing")

    @property
    def lock_s(self) -> float:
        return float(self._settings.delivery_lock_s)

    def announce(self, trouble: str = "") -> list[Due]:
        """Returns the outboxes whose delivery is due. An outbox is returned again after `lock_s`
        seconds if it is still due. Also stores that a courier is alive, and its problem `trouble`:
        BAD_CERTIFICATES or "".
        """
        now = self._clock()
        args: list[str | float] = [now, now + self.lock_s, _MOST_DUE, keys.COURIER_KNOWN_S, trouble]
        found = iter(self._announce([keys.OUTBOX_DUE, keys.COURIER], args))
        due = (
            readable(f"outbox {one[0].decode(errors='replace')!r}", partial(_due, *one))
            for one in zip(found, found, found, found, strict=True)
        )
        return [one for one in due if one is not None]

    def leave(self) -> None:
        """Deletes the record that a courier is alive. Other couriers store it again."""
        self._redis.delete(keys.COURIER)

    def take(self, outbox_id: str) -> Delivery | None:
        """Locks the next payload of an outbox for this courier. Returns None if nothing is due, the
        outbox is locked or it is unreadable. OutboxExpiredError, once, if the outbox has expired.
        """
        key, token, now = keys.outbox(outbox_id), uuid.uuid4().hex, self._clock()
        ttl_s = self._settings.callback_retention_sec
        # Without a url, the script returns whether the outbox has expired.
        for_url = self._redis.hget(key, "url") or b""
        found = self._take(
            [key, keys.receiver(receiver_of(for_url.decode(errors="replace")))],
            [token, now, now + self.lock_s, *self._most, ttl_s, BREAKS_AT, now + PROBE_S],
        )
        if not found:
            return None
        if len(found) == 1:
            raise OutboxExpiredError(
                f"Retention ended (POC_CALLBACK_RETENTION_SEC, {ttl_s} s): the undelivered data"
                f" of {outbox_id} is deleted."
            )
        # Without a transaction, which a full Redis refuses. Entries are removed only with the
        # token: if the token is unchanged after the entries were read, they are the payload.
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.lrange(key + ":entries", 0, int(found[3]) - 1)
            pipe.hget(key, "token")
            counted, holder = pipe.execute()
        if holder != token.encode():
            return None  # the lock has ended, and the entries may be those of the next payload
        return readable(
            f"outbox {outbox_id!r}", lambda: _delivery(outbox_id, token, found, counted)
        )

    def renew(self, delivery: Delivery) -> bool:
        """Extends a delivery's lock by `lock_s`. Returns False if another courier has the lock."""
        until, ttl_s = self._clock() + self.lock_s, self._settings.callback_retention_sec
        return bool(self._renew([keys.outbox(delivery.outbox_id)], [delivery.token, until, ttl_s]))

    def delivered(self, delivery: Delivery) -> bool:
        """Removes a payload that was accepted. Returns False if another courier has the lock."""
        return self._end_with(delivery, "delivered", self._settings.callback_interval_sec)

    def failed(self, delivery: Delivery, error: str, retry_after_s: float | None = None) -> float:
        """Keeps a payload after a failed delivery. Returns the seconds until the next try.
        `retry_after_s`: the receiver's Retry-After, limited to LONGEST_WAIT_S.
        """
        wait_s = backoff_s(delivery.failures)
        if retry_after_s is not None:
            wait_s = min(max(retry_after_s, FIRST_BACKOFF_S), LONGEST_WAIT_S)
        self._end_with(delivery, "failed", wait_s, error)
        return wait_s

    def halved(self, delivery: Delivery, why: str) -> bool:
        """Divides a payload that is too large into smaller payloads. If that is impossible, returns
        False and changes nothing; the caller must end the delivery by another method.
        """
        key, parts = keys.outbox(delivery.outbox_id), (b"", b"")
        if delivery.n_entries == 1:
            entry = self._redis.lindex(key + ":entries", 0)
            divided = entries.halves(entry, is_body=not delivery.is_round) if entry else None
            if divided is None:
                return False
            parts = divided
        ttl_s = self._settings.callback_retention_sec
        self._halve([key], [delivery.token, why[:500], self._clock(), ttl_s, *parts])
        return True

    def dropped(self, delivery: Delivery, error: str) -> bool:
        """Deletes a payload after the last try. Returns False if another courier has the lock."""
        return self._end_with(delivery, "dropped", self._settings.callback_interval_sec, error)

    def gone(self, delivery: Delivery, error: str) -> bool:
        """Deletes an outbox's payloads and url after status 410. Returns False if another courier
        has the lock.
        """
        return self._end_with(delivery, "gone", self._settings.callback_interval_sec, error)

    def drop_failing(self) -> int:
        """Deletes jobs' callbacks after BREAKS_AT failed tries in a row. Returns their number."""
        args = [self._clock(), self._settings.callback_retention_sec, BREAKS_AT]
        return int(self._drop_failing([keys.OUTBOX_JOBS], args))

    def _end_with(self, delivery: Delivery, end: str, next_in_s: float, error: str = "") -> bool:
        now, ttl_s = self._clock(), self._settings.callback_retention_sec
        args: list[Any] = [delivery.token, end, now + next_in_s, error[:500], now, ttl_s]
        args += self._most
        return bool(self._end([keys.outbox(delivery.outbox_id)], args))

    @property
    def _most(self) -> tuple[int, int]:
        """The limits of a payload: its number of artifacts and its bytes."""
        return self._settings.callback_max_artifacts, self._settings.callback_max_bytes

    def status(self, outbox_id: str) -> OutboxStatus:
        """Returns an outbox's status. A missing outbox counts as completely delivered."""
        return OutboxStatus.of(self._redis.hgetall(keys.outbox(outbox_id)))

    def n_jobs(self) -> int:
        """Returns the number of jobs with an undelivered callback, including unfinished jobs."""
        return int(self._redis.hlen(keys.OUTBOX_JOBS))


def _due(outbox_id: bytes, url: bytes, head: bytes, waiting_bytes: bytes) -> Due:
    return Due(outbox_id.decode(), receiver_of(url.decode()), bool(head), int(waiting_bytes))


def _delivery(
    outbox_id: str, token: str, taken: Sequence[bytes], counted: Sequence[bytes]
) -> Delivery:
    url, head, number, n_entries, _, failures = taken
    waiting = [entries.without_count(entry) for entry in counted]
    payload_id = f"{outbox_id}-{int(number)}"
    ending = b', "payload_id": "%s"}' % payload_id.encode()
    # A job's outbox has no head: its entry is the complete body, too large to parse.
    body = waiting[0]
    if head:
        round = json.loads(head)
        values = contract_of(round["scheme"]).values(entries.unpack(waiting))
        body = json.dumps(round["shared"] | values).encode()
    return Delivery(
        outbox_id,
        token,
        url.decode(),
        body.rstrip()[:-1] + ending,
        payload_id,
        failures=int(failures),
        is_round=bool(head),
        n_entries=int(n_entries),
    )
