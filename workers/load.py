"""Creates an engine. Imports only this engine's modules, because other packages may be missing."""

from poc_core.errors import ProoflineError
from workers.engines.base import Engine
from workers.engines.options import EngineOptions


def load_engine(options: EngineOptions, rpc_timeout_s: float = 60.0) -> Engine:
    """Loads an engine. ProoflineError if a package is missing or loading fails. `rpc_timeout_s`:
    seconds after which a silent vLLM engine counts as lost.
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
