"""Rounds in Redis against a model: leases, completions, losses and the end in any order."""

from __future__ import annotations

from typing import Any

import fakeredis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import JsonValue

from poc_core.fields import MAX_NONCE
from poc_core.records import Lease, Refusal, RoundRecord, RoundState
from poc_core.settings import Settings
from poc_core.state import entries, keys
from poc_core.state.overview import Overviews
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from poc_core.state.work import WorkStore
from tests.harness.fuzz import FUZZ
from tests.harness.samples import Clock, known, round_config, worker_record

PICK = st.integers(0, 1000)  # of a list, modulo its length
WORKERS = ("w1", "w2", "w3")


def places_of(lease: Lease) -> set[int]:
    return set(range(lease.place, lease.place + len(lease.nonces)))


class RoundMachine(RuleBasedStateMachine):
    """A round with a short sequence, so that its end is reached as well."""

    @initialize(n_places=st.integers(1, 40), node_id=st.integers(0, 1000))
    def begin(self, n_places: int, node_id: int) -> None:
        self.redis: Any = fakeredis.FakeRedis()
        self.clock, self.settings = Clock(), Settings()
        self.rounds = RoundStore(self.redis, self.settings, self.clock)
        self.registry = WorkerRegistry(self.redis, self.settings, self.clock)
        config = round_config(node_id=node_id, node_count=max(node_id + 1, MAX_NONCE // n_places))
        self.n_places = len(config.nonces)
        started = known(self.rounds.read(self.rounds.store(config, RoundState.GENERATING)))
        self.record: RoundRecord = started
        self.done: set[int] = set()  # places that were taken
        self.in_hand: dict[str, list[Lease]] = {worker: [] for worker in WORKERS}
        self.stores = {
            worker: WorkStore(self.redis, self.settings, worker, self.clock)
            for worker in (*WORKERS, "last")
        }
        # leases of workers that died or forgot them
        self.late: list[tuple[str, Lease]] = []
        self.alive: set[str] = set()
        self.is_stopped = False
        for worker in WORKERS:
            self.revive(worker)

    def teardown(self) -> None:
        if hasattr(self, "redis"):
            self.finish_everything()
            self.redis.close()

    # Workers.

    @rule(worker=st.sampled_from(WORKERS), wanted=st.integers(1, 9))
    def lease(self, worker: str, wanted: int) -> None:
        self.revive(worker)
        self.keep(worker, wanted, self.ask(worker, wanted))

    @precondition(lambda self: any(self.in_hand.values()))
    @rule(pick=PICK, wanted=st.integers(1, 9))
    def turn(self, pick: int, wanted: int) -> None:
        worker, lease = self.held(pick)
        self.revive(worker)
        self.in_hand[worker].remove(lease)
        expected, n_before = self.expected(lease), self.n_processed
        found = self.ask(worker, wanted, (lease, values_of(lease)))
        assert (self.n_processed > n_before) == expected
        self.stores[worker].hand.drop(lease.number)
        self.note_done(lease, expected)
        self.keep(worker, wanted, found)

    def ask(
        self, worker: str, wanted: int, done: tuple[Lease, list[JsonValue]] | None = None
    ) -> list[Lease] | Refusal:
        model = self.record.config.model
        return self.stores[worker].lease(model, round=self.record, places=wanted, done=done)

    def keep(self, worker: str, wanted: int, answer: list[Lease] | Refusal) -> None:
        """Checks what a worker was leased, and puts it into its hand."""
        if self.state is not RoundState.GENERATING:
            assert answer in ([], Refusal.EXHAUSTED)
            return
        # Somebody who may still bring them holds the nonces that are not done.
        if answer is Refusal.EXHAUSTED:
            assert not self.redis.exists(self.key + ":free")
            for name, holder in self.leases().items():
                holder = holder.split("|")[0]
                assert holder in self.alive
                assert name in map(lease_name, self.in_hand[holder])
            return
        assert isinstance(answer, list)
        (found,) = answer
        assert 1 <= len(found.nonces) <= wanted
        assert list(found.nonces) == [
            self.record.config.nonces[place] for place in sorted(places_of(found))
        ]
        for leases in self.in_hand.values():
            assert all(places_of(found).isdisjoint(places_of(other)) for other in leases)
        assert places_of(found).isdisjoint(self.done)
        self.in_hand[worker].append(found)

    @precondition(lambda self: any(self.in_hand.values()))
    @rule(pick=PICK)
    def complete(self, pick: int) -> None:
        worker, lease = self.held(pick)
        self.in_hand[worker].remove(lease)
        self.take(worker, lease)

    @precondition(lambda self: self.late)
    @rule(pick=PICK, keeps=st.booleans())
    def complete_late(self, pick: int, keeps: bool) -> None:
        """By a worker that lost the lease, or completes it a second time."""
        index = pick % len(self.late)
        worker, lease = self.late[index] if keeps else self.late.pop(index)
        expected = self.expected(lease)
        assert self.stores[worker].complete(lease, values_of(lease)) == expected
        self.note_done(lease, expected)

    @precondition(lambda self: any(self.in_hand.values()))
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        worker, lease = self.held(pick)
        self.in_hand[worker].remove(lease)
        holder = self.leases().get(lease_name(lease), "")
        assert self.stores[worker].release(lease) == holder.startswith(worker + "|")
        self.stores[worker].hand.drop(lease.number)

    @precondition(lambda self: self.late)
    @rule(pick=PICK)
    def release_late(self, pick: int) -> None:
        """By a worker that lost the lease, maybe to another."""
        worker, lease = self.late.pop(pick % len(self.late))
        holder = self.leases().get(lease_name(lease), "")
        assert self.stores[worker].release(lease) == holder.startswith(worker + "|")
        for own in [own for own in self.in_hand[worker] if lease_name(own) == lease_name(lease)]:
            self.lose(worker, own)

    @precondition(lambda self: any(self.in_hand.values()))
    @rule(pick=PICK)
    def forget(self, pick: int) -> None:
        worker, lease = self.held(pick)
        self.lose(worker, lease)
        self.revive(worker)  # its next heartbeat does not list it

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        self.alive.discard(worker)
        self.registry.remove(worker)
        for lease in list(self.in_hand[worker]):
            self.lose(worker, lease)

    @rule(seconds=st.sampled_from([1, 400]))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(chance=st.integers(0, 9))
    def stop(self, chance: int) -> None:
        if chance == 0:  # rarely: most rounds are to come to their end
            self.rounds.switch(self.record, RoundState.STOPPED)
            self.is_stopped = True

    # What always holds.

    @invariant()
    def every_place_is_done_or_to_be_had(self) -> None:
        if not hasattr(self, "record"):
            return
        next_place = int(self.redis.hget(self.key, "next") or 0)
        ranges = [
            *self.leases(),
            *(name.decode() for name in self.redis.zrange(self.key + ":free", 0, -1)),
        ]
        open_places: list[int] = []
        for name in ranges:
            first, places = map(int, name.split(":"))
            open_places += range(first, first + places)
        assert sorted([*open_places, *self.done]) == list(range(next_place))

    @invariant()
    def what_is_done_arrived_once(self) -> None:
        if not hasattr(self, "record"):
            return
        waiting: Any = self.redis.lrange(keys.outbox(self.record.round_id) + ":entries", 0, -1)
        pairs = entries.unpack(entries.without_count(entry) for entry in waiting)
        nonces = self.record.config.nonces
        assert sorted(pairs) == self.expected_pairs(nonces)
        read = known(self.rounds.read(self.record.round_id))
        assert (read.n_processed, read.n_valid + read.n_excluded) == (
            len(self.done),
            len(self.done),
        )
        is_over = len(self.done) == self.n_places
        assert (read.state is RoundState.STOPPED) == (is_over or self.is_stopped)
        assert (read.state is RoundState.GENERATING) == (
            self.rounds.generating(read.config.model) is not None
        )

    @invariant()
    def what_is_done_is_counted_for_its_worker(self) -> None:
        if not hasattr(self, "record"):
            return
        seen = Overviews(self.redis, self.clock).read()
        assert seen.round is not None
        assert seen.total_processed == sum(seen.round.rates.totals.values()) == len(self.done)

    def finish_everything(self) -> None:
        """No nonce is lost: a worker that comes at last gets all that is left, and the round
        ends with it.
        """
        if self.state is not RoundState.GENERATING:
            return
        for worker in WORKERS:
            self.die(worker)
        self.registry.heartbeat(worker_record("last"))
        while isinstance(found := self.ask("last", 5), list) and found:
            self.take("last", found[0])
        self.every_place_is_done_or_to_be_had()
        self.what_is_done_arrived_once()
        read = known(self.rounds.read(self.record.round_id))
        assert (read.state, read.is_exhausted) == (RoundState.STOPPED, True)
        assert self.done == set(range(self.n_places))
        counted = self.redis.hgetall(keys.counted(self.record.round_id))
        assert list(counted) == [b""]  # all was spread

    # The model's own.

    @property
    def key(self) -> str:
        return keys.round(self.record.round_id)

    @property
    def state(self) -> RoundState:
        read = known(self.rounds.read(self.record.round_id))
        return read.state

    def leases(self) -> dict[str, str]:
        """Of Redis: who holds which, and until when."""
        return {
            name.decode(): held.decode()
            for name, held in self.redis.hgetall(self.key + ":leases").items()
        }

    def expected_pairs(self, nonces: range) -> list[tuple[int, str]]:
        return [(nonces[place], f"v{place}") for place in sorted(self.done) if place % 7 != 3]

    def held(self, pick: int) -> tuple[str, Lease]:
        every = [(worker, lease) for worker, leases in self.in_hand.items() for lease in leases]
        return every[pick % len(every)]

    def lose(self, worker: str, lease: Lease) -> None:
        self.in_hand[worker].remove(lease)
        self.stores[worker].hand.drop(lease.number)
        self.late.append((worker, lease))

    def revive(self, worker: str) -> None:
        self.alive.add(worker)
        self.registry.heartbeat(worker_record(worker), self.stores[worker].hand.summary())

    @property
    def n_processed(self) -> int:
        read = known(self.rounds.read(self.record.round_id))
        return read.n_processed

    def expected(self, lease: Lease) -> bool:
        """A completion counts when its lease is held or free as it stands, and only then."""
        name = lease_name(lease)
        return name in self.leases() or self.redis.zscore(self.key + ":free", name) is not None

    def take(self, worker: str, lease: Lease) -> None:
        expected = self.expected(lease)
        assert self.stores[worker].complete(lease, values_of(lease)) == expected
        self.stores[worker].hand.drop(lease.number)
        self.note_done(lease, expected)

    def note_done(self, lease: Lease, counts: bool) -> None:
        if counts:
            assert places_of(lease).isdisjoint(self.done)
            self.done |= places_of(lease)


def values_of(lease: Lease) -> list[JsonValue]:
    return [None if place % 7 == 3 else f"v{place}" for place in sorted(places_of(lease))]


def lease_name(lease: Lease) -> str:
    return f"{lease.place}:{len(lease.nonces)}"


TestRoundsAgainstTheirModel = FUZZ(RoundMachine.TestCase)
