"""What vLLM mixes into its own worker class (`worker_extension_cls`); called by name through collective_rpc.

Arguments and results are plain data, so VLLM_ALLOW_INSECURE_SERIALIZATION stays off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from workers.vllm import lifeline

logger = logging.getLogger(__name__)

# On import, which is before the model is loaded: loading takes minutes, in which a worker may be killed too.
lifeline.hold()


class ProofExtension:
    """Proof methods of a vLLM worker. All names begin with `proof_` so that none meets one of vLLM's.

    Each answers {"value": ...} or {"error": sentence, "kind": "spec" or "failed"}. They never raise: with several ranks
    vLLM reads only the first rank's exception and would take the others' for the answer to the next call.
    """

    def proof_describe(self) -> dict[str, Any]:
        """Model sizes as the engine host needs them; an error when proofs would corrupt chat with this model."""
        return _answer(lambda: self._proof_runner().describe())

    def proof_compute(self, spec: dict[str, Any], nonces: list[int]) -> dict[str, Any]:
        """One micro-batch: {"values", "busy_s"}; None on every rank but the reporting one."""

        def compute() -> dict[str, Any] | None:
            started = time.perf_counter()
            values = self._proof_runner().compute(ProofSpec.model_validate(spec), nonces)
            return None if values is None else {"values": values, "busy_s": time.perf_counter() - started}

        return _answer(compute)

    def _proof_runner(self) -> Any:
        runner = self.__dict__.get("_proof_runner_instance")
        if runner is None:
            # Imported here: vLLM resolves this class before its worker has chosen a device.
            from workers.vllm.proof_runner import ProofRunner

            runner = self.__dict__["_proof_runner_instance"] = ProofRunner(self)
        return runner


def _answer(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except SpecError as error:
        return {"error": str(error), "kind": "spec"}
    except Exception as error:
        logger.exception("a proof call failed")
        return {"error": f"{type(error).__name__}: {error}", "kind": "failed"}
