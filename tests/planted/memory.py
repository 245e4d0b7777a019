"""A limit on GPU memory in vLLM's workers: see tests/integration/engines/test_gpu_memory.py."""

from typing import Any

import torch

from workers.vllm.extension import ProofExtension


class LimitedExtension(ProofExtension):
    """An extension whose process may be given less memory than its device has."""

    def proof_memory_begin(self) -> dict[str, Any]:
        """Begins to count, with nothing kept that is not in use."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.__dict__["_memory_before"] = torch.cuda.memory_reserved()
        return {"value": None}

    def proof_memory_taken(self) -> dict[str, Any]:
        """The most bytes taken from the device at a time since then."""
        torch.cuda.synchronize()
        return {"value": torch.cuda.max_memory_reserved() - self.__dict__["_memory_before"]}

    def proof_memory_limit(self, spare: int | None) -> dict[str, Any]:
        """Leaves so many bytes beside what is in use; None: all."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        share = 1.0 if spare is None else min(1.0, (torch.cuda.memory_reserved() + spare) / total)
        torch.cuda.set_per_process_memory_fraction(share)
        return {"value": None}
