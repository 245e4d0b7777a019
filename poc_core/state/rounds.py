"""Rounds in Redis: places of a nonce sequence, leased to workers, each computed once and counted.

The record outlives every process. A lease that is not completed goes to the next worker that asks,
so a dead worker's nonces arrive all the same; a lease completed twice counts once.
"""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import JsonValue, TypeAdapter
from redis import Redis

from poc_core.errors import RoundError
from poc_core.payloads import callback_url, payload_head
from poc_core.records import Lease, Refusal, RoundConfig, RoundRecord, RoundState
from poc_core.schemes import contract_of
from poc_core.schemes.contract import Reported
from poc_core.settings import Settings
from poc_core.state import keys, scripts
from poc_core.state.delivery import entries
from poc_core.state.unreadable import answers, readable

# Seconds after which a lease is handed to another worker, whatever its holder does.
LEASE_S = 300
# Places that Redis counts exactly: Lua's numbers are doubles.
_MOST_PLACES = 2**53 - 1
# Reported nonces kept for schemes whose /status lists them: some 5 MB. Callbacks carry all.
_MOST_KEPT = 100_000
# Reported nonces in one answer: 0.4 MB of JSON, and more than most rounds have.
MOST_LISTED = 10_000

# The fields of a round's hash that make a RoundRecord: not what each worker computed, which every
# worker would read again with each step of every other.
RECORD_FIELDS = (
    "state",
    "config",
    "created_at",
    "started_at",
    "stopped_at",
    "n_processed",
    "n_valid",
    "n_excluded",
    "error",
    "exhausted",
)
_RECORD = TypeAdapter(RoundRecord)


class RoundStore:
    """All operations on rounds, each atomic in Redis and safe to repeat."""

    def __init__(
        self, redis: Redis, settings: Settings, clock: Callable[[], float] = time.time
    ) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._settings = settings
        self._clock = clock
        self._store = scripts.load(redis, "store_round")
        self._switch = scripts.load(redis, "switch_round")
        self._lease = scripts.load(redis, "lease_nonces")
        self._complete = scripts.load(redis, "complete_lease")
        self._release = scripts.load(redis, "release_lease")
        self._forget = scripts.load(redis, "forget_rounds")
        self._read_reported = scripts.load(redis, "read_reported")

    # Clients: start, look, switch, stop.

    def store(self, config: RoundConfig, state: RoundState) -> str:
        """Makes a new round the current one and returns its id. RoundError: another generates."""
        round_id = uuid.uuid4().hex
        names = [keys.round(round_id), keys.outbox(round_id), keys.CURRENT_ROUND]
        names += [keys.generating(config.model), keys.FOLLOWED_ROUNDS]
        places = min(config.nonces.count, _MOST_PLACES)
        args: list[Any] = [round_id, state.value, config.model_dump_json(), places, self._clock()]
        args += [self._ttl_s, callback_url(config.url, "generated")]
        running = self._store(names, [*args, json.dumps(payload_head(config))])
        if running:
            raise RoundError(
                "A round is generating already: end it with POST /api/v1/pow/stop, or let a"
                " distance round validate with POST /api/v1/pow/phase/validate, before you start or"
                " store another."
            )
        return round_id

    def current(self) -> RoundRecord | None:
        """The round stored last, whatever its state; None when there was none or it expired."""
        round_id = self._redis.get(keys.CURRENT_ROUND)
        return None if round_id is None else self.read(round_id.decode())

    def read(self, round_id: str) -> RoundRecord | None:
        return round_record(round_id, self._redis.hmget(keys.round(round_id), RECORD_FIELDS))

    def switch(self, round: RoundRecord, state: RoundState, error: str = "") -> RoundState | None:
        """Sets the state of a round that is not STOPPED; returns the one it had, None if expired.

        Workers notice before their next slice but one. `error`: why it stopped by itself.
        """
        before = self._switch(
            [keys.round(round.round_id), keys.generating(round.config.model)],
            [round.round_id, state.value, self._clock(), self._ttl_s, error],
        )
        return RoundState(before.decode()) if before else None

    def generating(self, model: str) -> str | None:
        """The id of the round that the model's workers compute for."""
        round_id = self._redis.get(keys.generating(model))
        return None if round_id is None else str(round_id.decode())

    def forget_followed(self) -> int:
        """Forgets earlier rounds of which nothing is computed or delivered any more; how many."""
        return int(self._forget([keys.FOLLOWED_ROUNDS], [self._clock()]))

    def elapsed_s(self, round: RoundRecord) -> float:
        """Seconds since the round's first generation, until it stopped; 0 before."""
        if round.started_at is None:
            return 0.0
        return (round.stopped_at or self._clock()) - round.started_at

    def newest(self, most: int) -> list[RoundRecord]:
        """The rounds stored last that are still kept, the newest first."""
        ids = [raw.decode() for raw in self._redis.lrange(keys.NEWEST_ROUNDS, 0, most - 1)]
        with self._redis.pipeline(transaction=False) as pipe:
            for round_id in ids:
                pipe.hmget(keys.round(round_id), RECORD_FIELDS)
            found = zip(ids, answers(pipe), strict=True)
        records = (
            readable(f"round {name}", partial(round_record, name, raw)) for name, raw in found
        )
        return [record for record in records if record is not None]

    def reported(
        self, round_id: str, first: int | None = None, most: int = MOST_LISTED
    ) -> Reported:
        """At most `most` reported nonces and values, where the scheme lists them; of many the last.

        From place `first` on; None: the newest.
        """
        place, *found = self._read_reported(
            [keys.round(round_id)], ["" if first is None else first, most]
        )
        return Reported(int(place), entries.unpack(found))

    # Workers: lease, compute, complete.

    def lease(
        self, round: RoundRecord, worker_id: str, places: int, in_hand: Sequence[Lease] = ()
    ) -> Lease | Refusal:
        """Up to `places` nonces for a worker whose heart beats: lost ones first, then the next.

        `in_hand`: the leases that the worker computes; any other of its own is taken from it, as an
        answer was lost or an error made it forget.
        """
        return _leased(round, *self._lease(*self._lease_call(round, worker_id, places, in_hand)))

    def complete(self, lease: Lease, worker_id: str, values: Sequence[JsonValue]) -> bool:
        """Stores a lease's values, one per nonce in order; the valid ones go into the outbox.

        False: another worker had completed it. Also works after the round's end: nothing is lost.
        """
        return bool(self._complete(*self._complete_call(lease, worker_id, values)))

    def turn(
        self,
        done: Lease,
        values: Sequence[JsonValue],
        round: RoundRecord,
        worker_id: str,
        places: int,
        in_hand: Sequence[Lease],
    ) -> tuple[bool, Lease | Refusal]:
        """What `complete` and then `lease` return, for one request to Redis."""
        # `done` too is in hand still: should Redis not take it at once, it must not be given away.
        held = [*in_hand, done]
        taken, found = scripts.together(
            self._redis,
            (self._complete, *self._complete_call(done, worker_id, values)),
            (self._lease, *self._lease_call(round, worker_id, places, held)),
        )
        return bool(taken), _leased(round, *found)

    def _lease_call(
        self, round: RoundRecord, worker_id: str, places: int, in_hand: Sequence[Lease]
    ) -> tuple[list[str], list[Any]]:
        """The keys and args of lease_nonces.lua."""
        now = self._clock()
        args: list[Any] = [worker_id, places, now, now + LEASE_S, self._ttl_s]
        args += [
            self._settings.outbox_max_bytes,
            " ".join(f"{lease.place}:{len(lease.nonces)}" for lease in in_hand),
        ]
        names = [keys.round(round.round_id), keys.outbox(round.round_id)]
        return [*names, keys.generating(round.config.model), keys.CURRENT_ROUND], args

    def _complete_call(
        self, lease: Lease, worker_id: str, values: Sequence[JsonValue]
    ) -> tuple[list[str], list[Any]]:
        """The keys and args of complete_lease.lua."""
        pairs = list(zip(lease.nonces, values, strict=True))
        contract = contract_of(lease.spec.scheme)
        excluded = [nonce for nonce, value in pairs if value is None]
        valid = [
            (nonce, value)
            for nonce, value in pairs
            if value is not None and contract.is_reported(value, lease.terms)
        ]
        args: list[Any] = [lease.owner_id, lease.place, len(lease.nonces), worker_id]
        args += [json.dumps(excluded) if excluded else "", len(excluded)]
        args += [self._clock(), self._settings.callback_interval_sec, self._ttl_s]
        listed = [entries.pack([pair]) for pair in valid] if contract.lists_reported else []
        args += [_MOST_KEPT, len(listed), *listed]
        # A payload holds whole entries.
        most, most_bytes = self._settings.callback_max_artifacts, self._settings.callback_max_bytes
        for n, entry in entries.packed(valid, most, most_bytes):
            args += [n, entry]
        names = [keys.round(lease.owner_id), keys.outbox(lease.owner_id)]
        return [*names, keys.generating(lease.model)], args

    def release(self, lease: Lease, worker_id: str) -> bool:
        """Gives a lease back uncomputed to the next worker that asks."""
        args: list[Any] = [lease.place, len(lease.nonces), worker_id, self._ttl_s]
        return bool(self._release([keys.round(lease.owner_id)], args))

    @property
    def _ttl_s(self) -> int:
        return self._settings.callback_retention_sec


def _leased(round: RoundRecord, reason: bytes, *found: bytes) -> Lease | Refusal:
    """What lease_nonces.lua returned."""
    if reason != b"ok":
        return Refusal(reason.decode())
    config, (place, places) = round.config, map(int, found)
    nonces = config.nonces.take(place, places)
    about = (config.model, config.spec, nonces, config.terms)
    return Lease(round.round_id, place, *about, of_round=True)


def round_record(round_id: str, values: Sequence[bytes | None]) -> RoundRecord | None:
    """The round in RECORD_FIELDS of a hash; None where the hash is none, or left of one that
    expired.
    """
    found = zip(RECORD_FIELDS, values, strict=True)
    raw = {name: value.decode() for name, value in found if value is not None}
    if "state" not in raw:
        return None
    made = {"round_id": round_id, "is_exhausted": "exhausted" in raw}
    config = RoundConfig.model_validate_json(raw["config"])
    return _RECORD.validate_python(raw | made | {"config": config})
