"""A worker whose engine has a fault planted: too little memory, or a pause between two slices.

Nothing outside tests/ knows of it: this module is run in the place of `proofline`. A test plants by
writing files into the folder that PROOFLINE_TEST_PLANTS names.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch

from cli.supervise.stack import Stack
from tests.planted import unisolated
from workers.engines.base import Slice
from workers.vllm.extension import ProofExtension

FOLDER = "PROOFLINE_TEST_PLANTS"
# Files: tokens that fit into memory; a pause wanted in a slice after a micro-batch's first; its
# answer, the pid of the worker that pauses.
MEMORY, PAUSE, PAUSED = "memory", "pause", "paused"
# Seconds of that pause, in which the test kills the worker.
_PAUSE_S = 30.0
# Seconds of each layer until then.
_SLOW_S = 0.03


class PlantedExtension(ProofExtension):
    """Looks for plants before each slice."""

    def _proof_runner(self) -> Any:
        runner = super()._proof_runner()
        if not hasattr(runner, "planted"):
            runner.planted, run = Path(os.environ[FOLDER]), runner._run

            def look_and_run(one: Slice) -> None:
                _look(runner, one)
                run(one)

            runner._run = look_and_run
        return runner


def _look(runner: Any, one: Slice) -> None:
    if not isinstance(runner._stopwatch, _Slow):  # too little memory ends the one that was
        runner._stopwatch = _Slow(runner._stopwatch, runner.planted / PAUSE)
    batch = runner._micro_batches[one.micro_batch].batch
    memory, pause = runner.planted / MEMORY, runner.planted / PAUSE
    if memory.exists() and batch.order.n_tokens(one.step) > int(memory.read_text()):
        raise torch.OutOfMemoryError("planted: out of memory")
    if one.first > 0 and (mine := _taken(pause)):
        mine.write_text(str(os.getpid()))
        mine.rename(runner.planted / PAUSED)
        time.sleep(_PAUSE_S)


def _taken(plant: Path) -> Path | None:
    """The plant, if it is there and no other worker takes it."""
    try:
        return plant.rename(plant.with_suffix(f".{os.getpid()}"))
    except FileNotFoundError:
        return None


class _Slow:
    """A stopwatch that tells of slow layers while a pause is wanted: so quick machines cut too."""

    def __init__(self, stopwatch: Any, pause: Path) -> None:
        self._stopwatch, self._pause = stopwatch, pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stopwatch, name)

    def take(self) -> list[tuple[Any, float]]:
        ran = self._stopwatch.take()
        if not self._pause.exists():
            return list(ran)
        return [(tag, seconds + _SLOW_S * (tag[2] - tag[1])) for tag, seconds in ran]


class PlantedStack(Stack):
    def worker_command(self) -> list[str]:
        return unisolated.command(super().worker_command(), "tests.planted.worker.PlantedExtension")
