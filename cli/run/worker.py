"""`proofline worker`: runs one engine, which takes its work from the queue."""

import os
from typing import Annotated

import typer

from cli import options
from cli.engine_options import takes_engine_options
from cli.machine.cpu_memory import kv_cache_environment
from cli.model_choice import check_is_there, need_no_hub
from workers.endings import end_process
from workers.engines.options import EngineOptions


@takes_engine_options()
def worker(
    engine_options: EngineOptions,
    worker_id: Annotated[
        str | None,
        typer.Option(help="Id of the worker, different for every start. Default: generated."),
    ] = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """Run one worker: load the model, and compute batches from the model's queue until SIGTERM.

    Uses the GPUs that CUDA_VISIBLE_DEVICES names. SIGTERM lets the running batch finish. If the
    engine fails, the process exits, so that a supervisor can restart it; other workers compute its
    batches.
    """
    check_is_there(engine_options)
    need_no_hub(engine_options)
    if engine_options.engine == "vllm":
        os.environ.update(kv_cache_environment(engine_options.model, engine_options.n_devices))
    _run(engine_options, worker_id, redis_url)


def supervised_worker(engine_options: Annotated[str, typer.Argument(help="As JSON.")]) -> None:
    """Run one worker for `proofline up` or `workers`, which set its environment."""
    options = EngineOptions.model_validate_json(engine_options)
    need_no_hub(options)
    if options.span is not None and options.span.follows:
        from workers.vllm.start.host_follower import run_follower

        run_follower(options)
    _run(options)


def _run(
    engine_options: EngineOptions, worker_id: str | None = None, redis_url: str | None = None
) -> None:
    from workers.main import run_worker  # imported here: a follower needs no Celery

    run_worker(engine_options, worker_id, redis_url)
    end_process()
