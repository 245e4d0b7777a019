"""`proofline worker`: one engine that takes work from the queue."""

import os
from typing import Annotated

import typer

from cli import options


def worker(
    model: options.Model,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = "vllm",
    dtype: options.EngineDtype = "auto",
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    worker_id: Annotated[
        str | None,
        typer.Option("--worker-id", help="Must be new for every start. Default: made up.", show_default=False),
    ] = None,
    redis_url: options.RedisUrl = None,
    max_batch_tokens: options.MaxBatchTokens = None,
    synthetic_step_ms: options.SyntheticStepMs = 50.0,
    vllm_args: options.VllmArgs = None,
) -> None:
    """Run one worker: load the model, take batches from the model's queue until SIGTERM.

    It uses the GPUs that CUDA_VISIBLE_DEVICES shows it. SIGTERM lets the running batch finish. When the engine is lost
    the process exits, so that whatever supervises it can start another; its batches are run elsewhere.
    """
    from cli.machine.cpu_memory import kv_cache_environment
    from cli.model_choice import choose_model
    from cli.vllm_arguments import after_dashes
    from workers.engines.options import EngineOptions

    path, name = choose_model(model, served_model_name)
    engine_options = EngineOptions(
        model=path,
        served_model_name=name,
        engine=engine,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        max_batch_tokens=max_batch_tokens,
        synthetic_step_ms=synthetic_step_ms,
        vllm_args=tuple(after_dashes(vllm_args)),
    )
    if engine == "vllm":
        os.environ.update(kv_cache_environment(path, engine_options.n_devices))
    from workers.main import run_worker

    run_worker(engine_options, worker_id, redis_url)
