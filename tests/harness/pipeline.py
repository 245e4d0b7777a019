"""Starts micro-batches and records how each ends."""

from collections.abc import Sequence
from concurrent.futures import Future

from pydantic import JsonValue

from poc_core.records import ProofSpec
from tests.harness.samples import SPEC
from tests.peers.fake_engine import FakeEngine
from workers.engines.base import EngineMemoryError, MicroBatch
from workers.pipeline import Pipeline
from workers.slice_plan import SlicePlan


class Ends:
    """Micro-batches and how each of them ended, in order."""

    def __init__(self) -> None:
        self.values: dict[int, list[JsonValue]] = {}
        self.errors: dict[int, BaseException] = {}
        self.order: list[int] = []

    def of(self, number: int, nonces: Sequence[int], spec: ProofSpec = SPEC) -> MicroBatch:
        def end(future: Future[Sequence[JsonValue]]) -> None:
            self.order.append(number)
            if error := future.exception():
                self.errors[number] = error
            else:
                self.values[number] = list(future.result())

        micro_batch = MicroBatch(spec, nonces)
        micro_batch.future.add_done_callback(end)  # a future that ends twice raises
        return micro_batch

    def fly(
        self,
        engine: FakeEngine,
        *batches: Sequence[int],
        spec: ProofSpec = SPEC,
        limit_ms: float | None = 0.0,
    ) -> Pipeline:
        """Computes these micro-batches to their ends."""
        pipeline = pipeline_of(engine, limit_ms)
        for number, nonces in enumerate(batches):
            pipeline.add(self.of(number, nonces, spec))
        fly(pipeline)
        return pipeline


def pipeline_of(engine: FakeEngine, limit_ms: float | None = 0.0) -> Pipeline:
    """`limit_ms`: 0 for slices of one layer, None for whole stages."""
    return Pipeline(engine, SlicePlan(limit_ms, 1))


def fly(pipeline: Pipeline) -> None:
    """As Proofs does it while chat is idle."""
    for _ in range(5000):
        if pipeline.is_empty:
            return
        if pipeline.is_launched:
            pipeline.fetch()
        else:
            pipeline.run(wait=False)
    raise AssertionError("it never ends")


def out_of_memory() -> None:
    raise EngineMemoryError("out of memory")
