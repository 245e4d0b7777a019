"""`proofline worker`: one engine that takes work from the queue."""

import os
from typing import Annotated

import typer

from cli import options


def worker(
    model: options.Model,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = options.EngineKind.VLLM,
    dtype: options.EngineDtype = options.Dtype.AUTO,
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

    path, name = choose_model(model, served_model_name)
    further = after_dashes(vllm_args)
    if engine is options.EngineKind.VLLM:
        os.environ.update(kv_cache_environment(path, tensor_parallel * pipeline_parallel))
    from workers.main import WorkerOptions, run_worker

    run_worker(
        WorkerOptions(
            model=path,
            served_model_name=name,
            engine=engine.value,
            dtype=dtype.value,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            worker_id=worker_id,
            redis_url=redis_url,
            max_batch_tokens=max_batch_tokens,
            synthetic_step_ms=synthetic_step_ms,
            vllm_args=further,
        )
    )
