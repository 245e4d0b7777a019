"""What a round has computed, as its record says, against what came to its receiver."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import redis

from poc_core.settings import Settings
from poc_core.state.rounds import RoundStore
from tests.peers.receiver import gaps_and_repeats
from tests.stacks.round_client import uncomputed


class Computed(NamedTuple):
    """A round of one moment."""

    round_id: str
    n: int  # nonces that it counts
    left: Set[int]  # nonces that nobody has brought yet

    def problems(self, nonces: list[int], sequence: range) -> list[str]:
        """What is wrong with the nonces that came, a sentence each. `sequence`: the round's own."""
        found = []
        missing, repeated = gaps_and_repeats(nonces, sequence)
        if (n_came := len(set(nonces) - self.left)) != self.n:
            found.append(f"round {self.round_id}: {n_came} nonces came, it counts {self.n}")
        if repeated or set(missing) - self.left:
            found.append(f"round {self.round_id}: missing {missing[:10]}, repeated {repeated[:10]}")
        return found


def last_round(connection: redis.Redis) -> Computed | None:
    """The round stored last; to be noted before another follows it, as the node forgets it then."""
    store, last = RoundStore(connection, Settings()), None
    while (record := store.current()) is not None:
        seen = Computed(record.round_id, record.n_processed, uncomputed(connection, record))
        if seen == last:  # else a worker may have brought a lease between two reads
            return seen
        last = seen
    return None
