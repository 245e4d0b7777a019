"""Rounds in Redis: storing, switching and reading them. Workers compute the nonces (work.py)."""

import json
import uuid
from typing import Any

from poc_core.callbacks import callback_url
from poc_core.errors import RoundError
from poc_core.records import RoundConfig, RoundRecord, RoundState
from poc_core.schemes.contract import Reported, contract_of
from poc_core.state import entries, keys, scripts
from poc_core.state.client import Store
from poc_core.state.parsing import RECORD_FIELDS, answers, round_record

# Nonces that Redis counts exactly: Lua's numbers are doubles.
_MOST_PLACES = 2**53 - 1
# Reported nonces per answer: 0.4 MB of JSON, more than most rounds have.
MOST_LISTED = 10_000


class RoundStore(Store):
    """The store of rounds. Each operation is atomic in Redis and safe to repeat."""

    _store = scripts.of_store("store_round")
    _switch = scripts.of_store("switch_round")
    _forget = scripts.of_store("forget_rounds")
    _read_reported = scripts.of_store("read_reported")

    def store(self, config: RoundConfig, state: RoundState) -> str:
        """Stores a new current round, and returns its id. RoundError if a round is generating."""
        round_id = uuid.uuid4().hex
        names = [keys.round(round_id), keys.outbox(round_id), keys.CURRENT_ROUND]
        names += [keys.generating(config.model), keys.FOLLOWED_ROUNDS]
        places = len(config.nonces[:_MOST_PLACES])
        args: list[Any] = [round_id, state.value, config.model_dump_json(), places, self._clock()]
        args += [self._ttl_s, callback_url(config.url, "generated")]
        args += [json.dumps(_payload_head(config)), self._first_due]
        running = self._store(names, args)
        if running and self.read(running.decode()) is None:  # no worker computes it
            generating = [keys.round(running.decode()), keys.generating(config.model)]
            why = "Its record in Redis cannot be read."
            args_of = [running, "STOPPED", self._clock(), self._ttl_s, why, self._first_due]
            self._switch(generating, args_of)
            running = self._store(names, args)
        if running:
            raise RoundError(
                "A round is generating already: end it with POST /api/v1/pow/stop, or let a"
                " distance round validate with POST /api/v1/pow/phase/validate, before you start or"
                " store another."
            )
        return round_id

    def current(self) -> RoundRecord | None:
        """Returns the round stored last, in any state; None if there is none or it has expired."""
        round_id = self._redis.get(keys.CURRENT_ROUND)
        return None if round_id is None else self.read(round_id.decode())

    def read(self, round_id: str) -> RoundRecord | None:
        return round_record(round_id, self._redis.hmget(keys.round(round_id), RECORD_FIELDS))

    def switch(self, round: RoundRecord, state: RoundState, error: str = "") -> RoundState | None:
        """Changes a round's state unless the round is STOPPED. Returns the previous state; None if
        the round has expired. Workers finish at most two more slices. `error`: why the round
        stopped by itself.
        """
        before = self._switch(
            [keys.round(round.round_id), keys.generating(round.config.model)],
            [round.round_id, state.value, self._clock(), self._ttl_s, error, self._first_due],
        )
        return RoundState(before.decode()) if before else None

    def generating(self, model: str) -> str | None:
        """Returns the id of the round that generates with this model; None if there is none."""
        round_id = self._redis.get(keys.generating(model))
        return None if round_id is None else str(round_id.decode())

    def forget_followed(self) -> int:
        """Deletes earlier rounds with nothing left to compute or deliver. Returns their number."""
        return int(self._forget([keys.FOLLOWED_ROUNDS], [self._clock()]))

    def elapsed_s(self, round: RoundRecord) -> float:
        """Returns the seconds from a round's start until its stop or now; 0 before the start."""
        if round.started_at is None:
            return 0.0
        return (round.stopped_at or self._clock()) - round.started_at

    def newest(self, most: int) -> list[RoundRecord]:
        """Returns at most `most` rounds, the newest first."""
        ids = [raw.decode() for raw in self._redis.lrange(keys.NEWEST_ROUNDS, 0, most - 1)]
        with self._redis.pipeline(transaction=False) as pipe:
            for round_id in ids:
                pipe.hmget(keys.round(round_id), RECORD_FIELDS)
            found = zip(ids, answers(pipe), strict=True)
        records = (round_record(*one) for one in found)
        return [record for record in records if record is not None]

    def reported(
        self, round_id: str, first: int | None = None, most: int = MOST_LISTED
    ) -> Reported:
        """Returns at most `most` reported nonces with their values, if the scheme lists them.
        `first`: index of the first nonce among all reported nonces; None means the newest nonces.
        """
        args = ["" if first is None else first, most]
        place, *found = self._read_reported([keys.round(round_id)], args)
        return Reported(int(place), entries.unpack(found))

    @property
    def _first_due(self) -> float:
        return self._clock() + self._settings.callback_interval_sec

    @property
    def _ttl_s(self) -> int:
        return self._settings.callback_retention_sec


def _payload_head(config: RoundConfig) -> dict[str, Any]:
    """Returns the name of a round's scheme, and the fields that all callback payloads of the round
    have in common (protocol.md, section 6).
    """
    spec = config.spec
    shared = {
        "public_key": spec.public_key,
        "block_hash": spec.block_hash,
        "block_height": config.block_height,
        "node_id": config.node_id,
    }
    about = contract_of(spec.scheme).about(spec, config.terms)
    return {"scheme": spec.scheme, "shared": shared | about}
