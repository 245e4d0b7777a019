"""`proofline up`: runs the complete stack on one machine, in the foreground."""

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from cli import options
from cli.engine_options import takes_engine_options
from cli.supervise import foreground
from cli.supervise.stack import Stack, StackError
from cli.terminal import note
from poc_core.settings import Settings
from workers.engines.options import EngineOptions

# An engine may have to download and compile. Meanwhile StartStages announces long stages.
READY_TIMEOUT_S = 3600.0
WATCH_S = 0.5
# Variables that operators set for MLNode, and beginnings of further variables' names.
_OF_MLNODE = {
    *("MODEL_NAME", "INFERENCE_PORT", "VLLM_ATTENTION_BACKEND", "VLLM_PYTHON_PATH"),
    "VLLM_RUNNER_TIMEOUT",
}
_BEGINNINGS = ("POC_", "WATCHER_", "MLNODE_", "GONKA_")


@takes_engine_options(needs_model=False)
def up(
    engine_options: EngineOptions,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of workers, each with its own engine and GPUs. Default: 1 with --model; "
            "for a deployment, one for each group of GPUs, or 1 without GPUs.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address on which the API listens; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    ports: options.Ports = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            envvar="POC_REDIS_URL",
            help="Use this Redis. Default: start one on loopback, with an append-only file.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which the started Redis keeps its data across restarts. Default: a "
            "temporary folder, deleted at the end."
        ),
    ] = None,
    verbose: options.Verbose = False,
) -> None:
    """Run the complete stack on this machine in the foreground: Redis, API, courier and workers.

    Prints the stages of the start, and when the stack is ready. Restarts crashed processes. Ctrl-C
    or SIGTERM stops API, workers, courier and Redis, in this order, and leaves nothing running; a
    second Ctrl-C kills them at once.

    The processes' logs go to files in --data-dir, or in ~/.local/state/proofline; the start prints
    the folder.

    Worker 0 gets the first tensor-parallel x pipeline-parallel GPUs, worker 1 the next, and so on.

    Without --model the stack serves the deployed model (`proofline deploy`, POST
    /api/v1/inference/up), or waits for a deployment. If a model was deployed in the same Redis, the
    next start serves that model instead of --model.

    **Example:** proofline up --model tiny-qwen3
    """
    if (ignored := ignored_variables(os.environ)) is not None:
        note(f"up: {ignored}")
    first_port, *more_ports = ports or [options.DEFAULT_PORT]
    with foreground.stopped_by_signals("up"), ExitStack() as exits:
        log = exits.enter_context(foreground.logs_of_children(verbose, data_dir))
        stack = Stack(
            engine_options,
            workers=workers or 1,
            deployed_workers=workers,
            host=host,
            port=first_port,
            more_ports=more_ports,
            redis_url=redis_url,
            data_dir=data_dir,
            on_line=log,
            announce=lambda message: note(f"up: {message}"),
        )
        exits.enter_context(stack)
        if log.where:
            note(f"up: {log.where}")
        exits.callback(
            foreground.hurry_on_signals, stack.kill, "up: stopping API, workers, courier and Redis"
        )
        if not stack.waits_for_a_model:
            note(f"up: starting {stack.serves}")
        stack.wait_ready(READY_TIMEOUT_S)
        note(f"up: ready at {stack.base_url} {words_of_ready(stack)}; Ctrl-C stops everything")
        watch(stack)


def ignored_variables(names: Iterable[str]) -> str | None:
    """Returns a sentence that names the variables that Proofline ignores; None if none is."""
    ours = {f"POC_{field.upper()}" for field in Settings.model_fields} | {"GONKA_METRICS"}
    found = sorted(
        name
        for name in names
        if name not in ours and (name in _OF_MLNODE or name.startswith(_BEGINNINGS))
    )
    if not found:
        return None
    text = f"ignoring {', '.join(found)}: this node has no such setting (docs/settings.md)"
    if "VLLM_ATTENTION_BACKEND" in found:
        text += "; vLLM takes --attention-backend of the deployment in place of its old variable"
    return text


def words_of_ready(stack: Stack) -> str:
    """Returns the end of the line that `up` prints when the stack is ready."""
    pages = "(/console to see it, /docs for its API)"
    if stack.waits_for_a_model:
        return (
            f"{pages}; no model is deployed: `proofline deploy MODEL` or POST"
            " /api/v1/inference/up starts one"
        )
    return f"{pages}: {stack.serves}"


def watch(stack: Stack) -> None:
    while True:
        failure = stack.failure()
        if failure is not None:
            raise StackError(failure)
        time.sleep(WATCH_S)
