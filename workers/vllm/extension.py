"""The class that vLLM mixes into its worker class (`worker_extension_cls`), for collective_rpc.
Arguments and results are plain data, so VLLM_ALLOW_INSECURE_SERIALIZATION stays off.
"""

import logging
import traceback
from collections.abc import Callable
from typing import Any

from workers.vllm.start import lifeline

logger = logging.getLogger(__name__)

# At import, before the model is loaded: a worker may be killed during the minutes of loading.
lifeline.hold()


class ProofExtension:
    """Our methods of a vLLM worker, `proof_...`. Each returns {"value": ...} or {"error": sentence,
    "kind": "memory" or "failed"}. None raises an exception: vLLM would read only the first rank's
    exception, and mistake those of other ranks for answers to the next call.
    """

    def proof_run(self, method: str, *args: Any) -> dict[str, Any]:
        """Calls a method of this rank's ProofRunner. Fails if proofs would corrupt chat."""
        return _answer(lambda: getattr(self._proof_runner(), method)(*args))

    def proof_hook_chat(self) -> dict[str, Any]:
        """Installs hooks that score known tokens. Returns why that is impossible, or ""."""
        return _answer(self._hook_chat)

    def proof_ping(self) -> dict[str, Any]:
        """Returns an empty answer, which shows that this rank is alive."""
        return {"value": None}

    def _hook_chat(self) -> str:
        from workers.vllm.chat.v1_hooks import V1Hooks
        from workers.vllm.chat.v2_hooks import V2Hooks
        from workers.vllm.release import faults  # imported here, as below

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if "_proof_chat_lacks" in self.__dict__:
            return str(self.__dict__["_proof_chat_lacks"])
        why = ""
        try:
            faults.receive_activations(runner)
            faults.keep_generators(runner)
            if not hasattr(runner, "prompt_logprobs_worker"):
                V1Hooks(runner).install()
            elif runner.prompt_logprobs_worker is not None:  # else: not the last pipeline stage
                V2Hooks(runner).install()
        except (AttributeError, ValueError) as error:
            why = f"this release's model runner is not as expected ({error})"
        self.__dict__["_proof_chat_lacks"] = why
        return why

    def _proof_runner(self) -> Any:
        runner = self.__dict__.get("_proof_runner_instance")
        if runner is None:
            # Imported here: vLLM resolves this class before its worker has chosen a device.
            from workers.vllm.forward.proof_runner import ProofRunner

            runner = self.__dict__["_proof_runner_instance"] = ProofRunner(self)
        return runner


def _said(error: Exception) -> str:
    """Returns an error's type and text, or the source line that raised an error without text."""
    words = str(error)
    if not words and (frames := traceback.extract_tb(error.__traceback__)):
        words = (
            f"{frames[-1].line} ({frames[-1].filename.rpartition('site-packages/')[2]}, line"
            f" {frames[-1].lineno})"
        )
    return f"{type(error).__name__}: {words}"


def _answer(work: Callable[[], Any]) -> dict[str, Any]:
    import torch

    from workers.engines.shortage import first_line, is_of_memory

    try:
        return {"value": work()}
    except Exception as error:
        if not is_of_memory(error):
            logger.exception("a proof call failed")
            return {"error": _said(error), "kind": "failed"}
        failed = first_line(error)
    if torch.cuda.is_available():  # not in the handler, where the exception holds tensors
        torch.cuda.empty_cache()
    return {"error": failed, "kind": "memory"}
