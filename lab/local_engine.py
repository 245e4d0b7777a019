"""Runs an engine inside a command's own process, for commands that use no queue."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Any

from cli.machine.cpu_memory import kv_cache_environment
from cli.model_choice import check_is_there, need_no_hub
from cli.supervise.fleet import telling_lines
from cli.supervise.log_folder import LogFolder
from cli.supervise.start_stages import StartStages
from cli.terminal import note, people_at
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from poc_core.schemes.contract import contract_of
from poc_core.serving.logs import log_to_stderr
from workers.engines import stages
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.load import load_engine
from workers.pipeline import compute_all

# Micro-batches of one progress step: enough to fill the engine, few enough to move the bar.
STEP_BATCHES = 2
MAX_STEP_NONCES = 1024
_log_files: list[Path] = []  # of the engine, while its log is not shown


@contextmanager
def clean_stdout(verbose: bool = True) -> Iterator[IO[str]]:
    """Yields a stream to the real stdout. Inside the context, the output of libraries and child
    processes to stdout goes to stderr.

    Without `verbose`, stderr itself goes to a log file, whose path is printed.
    """
    sys.stdout.flush()
    with ExitStack() as exits:
        if not verbose:
            exits.enter_context(_stderr_in_a_file())
        kept = exits.enter_context(_turned(1, 2))
        stdout = exits.enter_context(os.fdopen(kept, "w", encoding="utf-8", closefd=False))
        exits.enter_context(redirect_stdout(sys.stderr))
        yield stdout
        sys.stdout.flush()


@contextmanager
def _stderr_in_a_file() -> Iterator[None]:
    """Redirects stderr to a log file inside the context. Messages of `note` and warnings of the
    engine are still shown.
    """
    try:
        folder = LogFolder()
    except (OSError, RuntimeError) as error:
        note(f"The engine's log is shown here, as no file can be written ({error}).")
        yield
        return
    path = folder.fresh("engine")
    with ExitStack() as exits:
        exits.callback(folder.close)
        with path.open("ab") as file:
            kept = exits.enter_context(_turned(2, file.fileno()))
        people = exits.enter_context(os.fdopen(kept, "w", buffering=1, closefd=False))
        exits.enter_context(people_at(people))
        exits.enter_context(_heard("workers", note, logging.WARNING))
        note(f"The engine's log is {path}; --verbose shows it here.")
        _log_files.append(path)
        exits.callback(_log_files.pop)
        yield


@contextmanager
def _turned(number: int, target: int) -> Iterator[int]:
    """Makes the file descriptor `number` refer to the file of `target` inside the context. Yields a
    descriptor of the original file.
    """
    kept = os.dup(number)
    os.set_inheritable(kept, False)
    os.dup2(target, number)
    try:
        yield kept
    finally:
        os.dup2(kept, number)
        os.close(kept)


@contextmanager
def _heard(logger: str, take: Callable[[str], None], level: int) -> Iterator[None]:
    """Calls `take` with each message of this logger and its children inside the context, if the
    message has at least the given level.
    """
    handler = logging.Handler(level)
    vars(handler)["emit"] = lambda record: take(record.getMessage())
    logging.getLogger(logger).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(logger).removeHandler(handler)


def _end_of_log() -> str:
    """Returns the lines in the engine's log file that explain why loading failed; "" if there is no
    log file, because the log was shown.
    """
    if not _log_files:
        return ""
    lines = telling_lines(_log_files[-1].read_text(errors="replace").splitlines())
    return "\n  ".join(["\n  The end of its log:", *lines, f"All of it: {_log_files[-1]}"])


@contextmanager
def local_engine(options: EngineOptions) -> Iterator[Engine]:
    """Loads an engine, prints the stages of its start, yields it, and closes it at the end.

    Must be used inside `clean_stdout`, because engines print much. If loading fails, the end of the
    engine's log is added to the error.
    """
    check_is_there(options)
    need_no_hub(options)
    if options.engine == "vllm":
        os.environ.update(kv_cache_environment(options.model, options.n_devices))
        # By default vLLM compiles these kernels for some thousand sizes; these commands use a few.
        os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    log_to_stderr()
    start = StartStages(1, note)
    with _heard(stages.logger.name, lambda line: start.hear("", line), logging.INFO):
        try:
            engine = load_engine(options)
        except ProoflineError as error:
            error.args = (f"{error}{_end_of_log()}",)
            raise
        start.ready("")
    try:
        yield engine
    finally:
        engine.close()


def compute_in_steps(engine: Engine, spec: ProofSpec, nonces: Sequence[int]) -> Iterator[list[Any]]:
    """Computes the proof values of the nonces, in order. Yields them in lists that are small enough
    to show progress.
    """
    step = min(
        MAX_STEP_NONCES,
        STEP_BATCHES * contract_of(spec.scheme).max_batch(spec, engine.info),
    )
    for start in range(0, len(nonces), step):
        yield compute_all(engine, spec, nonces[start : start + step])


def progress_title(engine: Engine) -> str:
    return f"Computing on {engine.info.name}, {engine.info.dtype}"
