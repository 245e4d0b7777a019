"""The engines. Each is imported only when asked for: a worker with one needs not what another imports."""

from typing import TYPE_CHECKING

from poc_core.errors import ProoflineError

if TYPE_CHECKING:
    from workers.engines.base import Engine, EngineOptions

ENGINE_KINDS = ("vllm", "transformers", "synthetic")


def load_engine(kind: str, options: "EngineOptions") -> "Engine":
    """A loaded engine of `kind`. ProoflineError: no such kind, something is not installed, bad options."""
    if kind not in ENGINE_KINDS:
        raise ProoflineError(f"There is no engine {kind[:80]!r}; use one of {', '.join(ENGINE_KINDS)}.")
    if kind != "vllm" and (options.tensor_parallel, options.pipeline_parallel) != (1, 1):
        raise ProoflineError(
            f"The {kind} engine runs on one device; tensor and pipeline parallelism need --engine vllm."
        )
    if kind != "vllm" and options.vllm_args:
        raise ProoflineError(f"Arguments after -- are vLLM's; the {kind} engine takes none.")
    try:
        return _load(kind, options)
    except ModuleNotFoundError as error:
        raise ProoflineError(
            f"The {kind} engine needs {error.name}, which is not installed here; `make setup` installs it."
        ) from error


def _load(kind: str, options: "EngineOptions") -> "Engine":
    if kind == "vllm":
        from workers.vllm.engine import VllmEngine

        return VllmEngine(
            options.model,
            served_model_name=options.served_model_name,
            dtype=options.dtype,
            tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.pipeline_parallel,
            max_batch_tokens=options.max_batch_tokens,
            rpc_timeout_s=options.rpc_timeout_s,
            vllm_args=options.vllm_args,
        )
    if kind == "transformers":
        from workers.engines.transformers import TransformersEngine

        return TransformersEngine(
            options.model,
            served_model_name=options.served_model_name,
            dtype=options.dtype,
            max_batch_tokens=options.max_batch_tokens,
        )
    from workers.engines.synthetic import SyntheticEngine

    return SyntheticEngine(options.served_model_name or options.model, step_ms=options.step_ms)
