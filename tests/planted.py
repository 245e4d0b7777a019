"""A worker whose engine has what a test plants in it: too little memory, or a pause between two slices.

Nothing outside tests/ knows of it: a worker gets it only by running this module in the place of `proofline`. A test
plants by writing files into the folder that PROOFLINE_TEST_PLANTS names.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch

from cli.supervise.stack import Stack
from tests import unisolated
from workers.vllm.extension import ProofExtension

FOLDER = "PROOFLINE_TEST_PLANTS"
# Files: tokens that fit into memory; that the next slice but the first of a micro-batch is to take its time; and the
# answer to that, the pid of the worker that takes it.
MEMORY, PAUSE, PAUSED = "memory", "pause", "paused"
# Seconds of that pause, in which the test kills the worker.
_PAUSE_S = 30.0


class PlantedExtension(ProofExtension):
    """Looks for what is planted before each slice."""

    def _proof_runner(self) -> Any:
        runner = super()._proof_runner()
        if not hasattr(runner, "planted"):
            runner.planted, run = Path(os.environ[FOLDER]), runner._run

            def look_and_run(flight_id: int, layers: range) -> None:
                _look(runner, flight_id, layers)
                run(flight_id, layers)

            runner._run = look_and_run
        return runner


def _look(runner: Any, flight_id: int, layers: range) -> None:
    flight = runner._flights[flight_id]
    memory, pause = runner.planted / MEMORY, runner.planted / PAUSE
    if memory.exists() and len(flight.nonces) * flight.spec.seq_len > int(memory.read_text()):
        raise torch.OutOfMemoryError("planted: out of memory")
    if layers.start > 0 and pause.exists():
        pause.unlink()
        # The folder's files appear whole.
        (runner.planted / "new").write_text(str(os.getpid()))
        (runner.planted / "new").rename(runner.planted / PAUSED)
        time.sleep(_PAUSE_S)


class PlantedStack(Stack):
    def worker_command(self) -> list[str]:
        return unisolated.command(super().worker_command(), "tests.planted.PlantedExtension")
