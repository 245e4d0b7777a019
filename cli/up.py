"""`proofline up`: the whole stack in the foreground on one machine."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options
from cli.console import note

if TYPE_CHECKING:
    from cli.stack import Stack

# An engine may have to download and compile; until then `up` says every so often what it waits for.
READY_TIMEOUT_S = 3600.0
WATCH_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COLORS = (36, 33, 32, 35, 34)  # ANSI, one after the other for each process; red stays for errors


def up(
    model: options.Model,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = options.EngineKind.VLLM,
    dtype: options.EngineDtype = options.Dtype.AUTO,
    workers: Annotated[
        int, typer.Option(min=1, help="Workers, each with an engine; with GPUs, each gets its own.")
    ] = 1,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    host: Annotated[str, typer.Option(help="Address the API listens on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port of the API; 0 for a free one.")] = 8000,
    redis_url: Annotated[
        str | None,
        typer.Option(
            "--redis-url",
            envvar="POC_REDIS_URL",
            help="Use this Redis. Default: start one on loopback, with an append-only file.",
            show_default=False,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="Where our own Redis keeps its data, over restarts. Default: a temporary one, removed at the end.",
            show_default=False,
        ),
    ] = None,
    max_batch_tokens: options.MaxBatchTokens = None,
    synthetic_step_ms: options.SyntheticStepMs = 50.0,
    vllm_args: options.VllmArgs = None,
) -> None:
    """Run the whole stack on this machine, in the foreground: Redis, the API, the courier and workers.

    Says when it is ready and restarts what crashes. Ctrl-C or SIGTERM stops API, workers, courier and Redis, in this
    order, and leaves nothing running; a second Ctrl-C does not wait for them.

    Worker 0 gets the first tensor-parallel x pipeline-parallel GPUs, worker 1 the next, and so on.

    **Example:** proofline up --model tiny-qwen3
    """
    from cli.stack import Stack
    from cli.vllm_arguments import after_dashes

    stack = Stack(
        model=model,
        engine=engine.value,
        served_model_name=served_model_name,
        dtype=dtype.value,
        workers=workers,
        host=host,
        port=port,
        redis_url=redis_url,
        data_dir=data_dir,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        synthetic_step_ms=synthetic_step_ms,
        max_batch_tokens=max_batch_tokens,
        vllm_args=after_dashes(vllm_args),
        on_line=LabelledLog(),
        announce=lambda message: note(f"up: {message}"),
    )
    with stopped_by_signals(), ExitStack() as exits:
        exits.enter_context(stack)
        exits.callback(hurry_on_signals, stack)
        note(f"up: starting {workers} worker(s) for {stack.model_name}")
        stack.wait_ready(READY_TIMEOUT_S)
        note(f"up: ready at {stack.base_url} (documentation: {stack.base_url}/docs); Ctrl-C stops everything")
        watch(stack)


def watch(stack: "Stack") -> None:
    """Returns never; raises StackError when the stack cannot work any more."""
    from cli.stack import StackError

    while True:
        failure = stack.failure()
        if failure is not None:
            raise StackError(failure)
        time.sleep(WATCH_S)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into an orderly end of the block, which then counts as done."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        note("up: everything has stopped")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hurry_on_signals(stack: "Stack") -> None:
    """While the stack stops: a further signal means now."""
    note("up: stopping API, workers, courier and Redis; a second Ctrl-C does not wait for them")
    for number in STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: stack.kill())


class LabelledLog:
    """Writes the lines of all processes to stderr, each behind its process's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._colors: dict[str, int] = {}
        self._in_color = sys.stderr.isatty()

    def __call__(self, name: str, line: str) -> None:
        with self._lock:
            label = f"{name:<9}|"
            if self._in_color:
                color = self._colors.setdefault(name, COLORS[len(self._colors) % len(COLORS)])
                label = f"\x1b[{color}m{label}\x1b[0m"
            sys.stderr.write(f"{label} {line}\n")
            sys.stderr.flush()
