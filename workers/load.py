"""Picks an engine and imports only that one: no worker needs what another's imports."""

from poc_core.errors import ProoflineError
from workers.engines.base import Engine
from workers.engines.options import EngineOptions


def load_engine(options: EngineOptions, rpc_timeout_s: float = 60.0) -> Engine:
    """A loaded engine. ProoflineError: something is not installed, or the model cannot be loaded.

    `rpc_timeout_s`: how long a micro-batch of vLLM may take before the engine counts as lost.
    """
    try:
        if options.engine == "vllm":
            from workers.vllm.self_tests import load

            return load(options, rpc_timeout_s)
        if options.engine == "transformers":
            from workers.engines.transformers import TransformersEngine

            return TransformersEngine(options)
        from workers.engines.synthetic import SyntheticEngine

        return SyntheticEngine(options)
    except ModuleNotFoundError as error:
        raise ProoflineError(
            f"The {options.engine} engine needs {error.name}, which is not installed here; `make"
            " setup` installs it."
        ) from error
