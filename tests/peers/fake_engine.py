"""An engine that computes nothing: checks its callers, notes their calls, fails when told."""

import time
from collections.abc import Callable, Sequence

from pydantic import JsonValue

from poc_core.errors import ProoflineError
from poc_core.records import ModelInfo, ProofSpec
from poc_core.schemes.contract import contract_of
from tests.harness.samples import MODEL
from workers.engines.base import Engine, Slice, Tick, TickResult


def value(spec: ProofSpec, nonce: int) -> str:
    return f"{spec.block_hash}:{nonce}"


def values(spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
    return [value(spec, nonce) for nonce in nonces]


def break_down() -> None:
    raise ProoflineError("CUDA error")


class FakeEngine(Engine):
    """`n_stages` stages of `layers` layers; a layer takes `layer_s`, of which it says `said_s`.

    `late`: values come with the next tick, as from a GPU; `slow`: only when waited for. `events`:
    what happens within the n-th tick that launches something, from 0; where one raises, the tick
    raises and all micro-batches are forgotten.
    """

    def __init__(
        self, n_stages: int = 1, layers: int = 4, late: bool = False, layer_s: float = 0.0
    ) -> None:
        self.stages = [range(stage * layers, (stage + 1) * layers) for stage in range(n_stages)]
        self.info = ModelInfo(
            MODEL, 128, n_stages * layers, 1024, max_batch_tokens=8192, dtype="float32"
        )
        self.layer_s = layer_s
        self.said_s: float | None = None
        self.late = late
        self.slow = False
        self.events: dict[int, Callable[[], object]] = {}
        self.memory: int | None = None  # tokens that fit
        self.memory_error: Callable[[], object] = lambda: None
        self.ticks: list[Tick] = []  # those that launched something
        self.fetches: list[Tick] = []  # those that launched nothing
        self.begun: list[list[int]] = []  # nonces of each micro-batch, in order
        self.refuse: dict[str, str] = {}  # block_hash: why
        self.chat = 0  # unfinished requests
        self.closed = False
        # With the nonces of one forward of all rows, and the next layer and pass.
        self._going: dict[int, tuple[ProofSpec, Sequence[int], int, int, int]] = {}
        self._done: dict[int, list[JsonValue]] = {}

    def tick(self, tick: Tick) -> TickResult:
        (self.ticks if tick.slices else self.fetches).append(tick)
        for dropped in tick.drop:
            self._going.pop(dropped, None)
            self._done.pop(dropped, None)
        done = {
            one: found for one, found in self._done.items() if tick.fetch == one or not self.slow
        }
        self._done = {one: found for one, found in self._done.items() if one not in done}
        try:
            refused = self._begin(tick)
            event = self.events.get(len(self.ticks) - 1) if tick.slices else None
            if event is not None:
                event()
            ran = self._run([one for one in tick.slices if one.micro_batch not in refused])
        except BaseException:
            self._going.clear()
            raise
        if tick.wait or not (self.late or self.slow):
            done |= self._done
            self._done.clear()
        return TickResult(refused, ran, done)

    def unfinished_chat(self) -> int:
        return self.chat

    def close(self) -> None:
        self.closed = True

    def _begin(self, tick: Tick) -> dict[int, str]:
        refused = {}
        for one in tick.begin:
            assert one.id not in self._going
            if one.spec.block_hash in self.refuse:
                refused[one.id] = self.refuse[one.spec.block_hash]
                continue
            self.begun.append(list(one.nonces))
            self._going[one.id] = (one.spec, one.nonces, one.part or len(one.nonces), 0, 0)
        return refused

    def _run(self, slices: Sequence[Slice]) -> list[tuple[Slice, float]]:
        stages = [
            next(index for index, stage in enumerate(self.stages) if one.first in stage)
            for one in slices
        ]
        assert len(set(stages)) == len(stages), "a stage runs one slice at a time"
        ran = []
        for one, stage in zip(slices, stages, strict=True):
            spec, nonces, part, at, step = self._going[one.micro_batch]
            n_layers, n_parts = self.stages[-1].stop, -(-len(nonces) // part)
            n_passes = n_parts + contract_of(spec.scheme).passes(spec).steps
            assert one.first == at < one.end <= self.stages[stage].stop, (
                "layers run once, in order, each on its stage"
            )
            assert one.step == step < one.until <= n_passes, "passes run once, in order"
            whole_steps = step >= n_parts and one.end - one.first == n_layers
            assert one.until == step + 1 or whole_steps, "several passes are whole steps"
            if self.memory is not None and min(part, len(nonces)) * spec.seq_len > self.memory:
                self.memory_error()
            n = (one.end - one.first) * (one.until - step)
            time.sleep(self.layer_s * n)
            said_s = self.layer_s if self.said_s is None else self.said_s
            ran.append((one, said_s * n))
            if one.end < n_layers:
                self._going[one.micro_batch] = (spec, nonces, part, one.end, step)
            elif one.until < n_passes:
                self._going[one.micro_batch] = (spec, nonces, part, 0, one.until)
            else:
                del self._going[one.micro_batch]
                self._done[one.micro_batch] = values(spec, nonces)
        return ran

    @property
    def slices(self) -> list[Slice]:
        return [one for tick in self.ticks for one in tick.slices]

    @property
    def n_going(self) -> int:
        return len(self._going)

    @property
    def is_idle(self) -> bool:
        """Whether the engine holds no micro-batch."""
        return not self._going and not self._done
