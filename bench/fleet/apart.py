"""Workers' heartbeats at ordinary priority, to compare with those of the herd.

`python -m bench.fleet.apart` is one process that sends the heartbeats of a few workers. If they are
late, Redis or the product is slow; the heartbeats of the herd may only have waited for a core.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.fleet.herd import end, end_with_parent, wait_for_sigterm
from bench.harness.node import MODEL
from poc_core.records import WorkerRecord
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.registry import WorkerRegistry
from poc_core.state.work import HeldLeases
from workers.engines.options import EngineOptions
from workers.engines.synthetic import SyntheticEngine
from workers.heartbeat import Heartbeat
from workers.proofs import Proofs

HOST = "apart"
WORKERS = 6


@contextmanager
def apart(redis_url: str) -> Iterator[None]:
    """Runs the process inside the context."""
    process = subprocess.Popen([sys.executable, "-m", "bench.fleet.apart", redis_url])
    try:
        yield
    finally:
        end(process)


def run(redis_url: str) -> None:
    """Sends heartbeats until SIGTERM."""
    settings = load_settings(redis_url=redis_url)
    engine = SyntheticEngine(EngineOptions(model=MODEL, engine="synthetic"))
    beats = []
    for number in range(WORKERS):
        record = WorkerRecord(
            id=f"{HOST}/gpu{number}-{number:06x}",
            model=MODEL,
            engine="synthetic",
            host=HOST,
            pid=0,
            state="starting",
            started_at=time.time(),
        )
        registry = WorkerRegistry(connect(settings), settings)
        beats.append(Heartbeat(record, registry, HeldLeases(), settings.heartbeat_s))
        beats[-1].start()
        beats[-1].ready(Proofs(engine), None)
    wait_for_sigterm()
    for beat in beats:
        beat.stop()


if __name__ == "__main__":
    end_with_parent()
    run(sys.argv[1])
