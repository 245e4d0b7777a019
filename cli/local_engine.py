"""An engine inside the command's own process, for the commands that need no queue."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poc_core.records import ProofSpec
    from workers.engines.base import Engine
    from workers.engines.options import EngineOptions

# Micro-batches of one progress step: enough to fill the engine, few enough that the bar moves.
STEP_BATCHES = 2
MAX_STEP_NONCES = 1024


@contextmanager
def stdout_kept_clean() -> Iterator[IO[str]]:
    """Yields the real stdout; what libraries and child processes print goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.set_inheritable(kept, False)
    os.dup2(2, 1)
    try:
        with (
            os.fdopen(kept, "w", encoding="utf-8", closefd=False) as stdout,
            redirect_stdout(sys.stderr),
        ):
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def local_engine(options: "EngineOptions") -> Iterator["Engine"]:
    """The loaded engine, closed afterwards. Use within `stdout_kept_clean`: engines are noisy."""
    from cli.machine.cpu_memory import kv_cache_environment
    from workers.engines import load_engine

    if options.engine == "vllm":
        os.environ.update(kv_cache_environment(options.model, options.n_devices))
    engine = load_engine(options)
    try:
        yield engine
    finally:
        engine.close()


def compute_in_steps(
    engine: "Engine", spec: "ProofSpec", nonces: Sequence[int]
) -> Iterator[list[Any]]:
    """Yields the nonces' values, in order, in lists small enough to show progress between them."""
    from poc_core.schemes import contract_of
    from workers.pipeline import compute_all

    step = min(
        MAX_STEP_NONCES,
        STEP_BATCHES * contract_of(spec.scheme).max_batch(spec, engine.info),
    )
    for start in range(0, len(nonces), step):
        yield compute_all(engine, spec, nonces[start : start + step])


def progress_title(engine: "Engine") -> str:
    return f"Computing on {engine.info.name}, {engine.info.dtype}"
