"""A worker's main loop: leases nonces, computes some micro-batches at a time, stores values."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from poc_core import errors
from poc_core.records import Lease
from workers.engines.base import MicroBatch
from workers.proofs import Proofs

# Seconds between two checks whether the work is still wanted, and so the longest delay of /stop.
# With many workers and slow batches, most requests to Redis are these checks.
_LOOK_S = 0.25


class Source(Protocol):
    """The interface through which a Runner leases nonces and stores their values."""

    def next(self, held: Sequence[Lease]) -> Sequence[Lease] | None:
        """Returns new leases, all with the same spec. Returns [] if there is no work at the moment,
        None if the run must end.
        """

    def is_wanted(self, leases: Sequence[Lease]) -> bool:
        """Returns True if these leases should still be computed, False to give them back."""

    def complete(self, lease: Lease, values: Sequence[JsonValue]) -> None:
        """Stores a lease's values, one per nonce, immediately or with the next call of a method."""

    def release(self, lease: Lease, lost_engine: bool) -> None:
        """Gives back a lease that was not computed. `lost_engine`: True if the engine failed."""

    def fail(self, leases: Sequence[Lease], error: errors.ProoflineError) -> None:
        """Ends the jobs and rounds of these leases with the error: no engine can compute them."""


@dataclass
class _Unit:
    """Leases whose nonces are computed together, in the order of the leases."""

    leases: Sequence[Lease]
    waiting: list[int]  # nonces without a micro-batch so far
    micro_batches: deque[MicroBatch] = field(default_factory=deque)
    values: list[JsonValue] = field(default_factory=list)


class Runner:
    """A loop that computes the leases of one source. Not thread-safe."""

    def __init__(self, proofs: Proofs, source: Source) -> None:
        self._proofs = proofs
        self._source = source
        self._units: deque[_Unit] = deque()  # oldest first; kept between calls of `run`

    @property
    def held(self) -> list[Lease]:
        return [lease for unit in self._units for lease in unit.leases]

    @property
    def is_under_way(self) -> bool:
        """Returns whether the runner holds leases. Any thread may call it."""
        return bool(self._units)

    def run(self, is_over: Callable[[], bool]) -> bool:
        """Computes until `is_over()`, then returns True and keeps unfinished leases for the next
        call. If no work is left, or after an error, returns False and holds no leases.
        """
        goes_on = False
        try:
            goes_on = self._run(is_over)
        finally:
            if not goes_on:
                self.give_back()
        return goes_on

    def _bring_home(self) -> bool:
        """Waits briefly for the oldest micro-batch's values, and stores the values of each lease
        that is now complete. Returns False if the run must end after an error.
        """
        unit = self._units[0]
        try:
            values = unit.micro_batches[0].result(_LOOK_S)
        except errors.ProoflineError as error:
            return self._fail(unit.leases, error)
        if values is None:
            if not self._source.is_wanted(unit.leases):
                self.give_back()
            return True
        unit.micro_batches.popleft()
        unit.values += values
        if not (unit.micro_batches or unit.waiting):
            self._units.popleft()
            first = 0
            for lease in unit.leases:
                end = first + len(lease.nonces)
                self._source.complete(lease, unit.values[first:end])
                first = end
        return True

    def give_back(self, lost_engine: bool = False) -> None:
        while self._units:
            unit = self._units.popleft()
            for micro_batch in unit.micro_batches:
                self._proofs.cancel(micro_batch)
            for lease in unit.leases:
                self._source.release(lease, lost_engine)

    def _run(self, is_over: Callable[[], bool]) -> bool:
        more = True
        while not is_over():
            more = more and self._fill()
            if self._units:
                if not self._bring_home():
                    return False
            elif not more:
                return False
        return True

    def _fill(self) -> bool:
        """Submits micro-batches until the engine has enough. Returns False if the run must end."""
        while sum(len(unit.micro_batches) for unit in self._units) < self._proofs.depth:
            if not self._units or not self._units[-1].waiting:
                if self._units and self._units[-1].leases[0].alone:
                    return True
                leases = self._source.next(self.held)
                if not leases:
                    return leases is not None
                if self._units and leases[0].alone:  # leased again when no other lease is held
                    self._source.release(leases[0], lost_engine=False)
                    return True
                nonces = [nonce for lease in leases for nonce in lease.nonces]
                self._units.append(_Unit(leases, nonces))
            if not self._submit(self._units[-1]):
                return False
        return True

    def _submit(self, unit: _Unit) -> bool:
        spec, urgent = unit.leases[0].spec, unit.leases[0].urgent
        try:
            size = self._proofs.batch_size(spec)
            unit.micro_batches.append(self._proofs.submit(spec, unit.waiting[:size], urgent))
        except errors.ProoflineError as error:
            return self._fail(unit.leases, error)
        del unit.waiting[:size]
        return True

    def _fail(self, leases: Sequence[Lease], error: errors.ProoflineError) -> bool:
        """Handles an error: fails the jobs and rounds of `leases` if no engine can compute them,
        and gives back all other leases. Returns False if the run must end.
        """
        is_hopeless = isinstance(error, errors.SpecError)
        if is_hopeless:
            self._source.fail(leases, error)
        self._proofs.note(error)
        try:
            self.give_back(lost_engine=not is_hopeless)
        finally:
            goes_on = self._proofs.judge(error)
        return goes_on
