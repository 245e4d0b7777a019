"""Fused kernels for the norms of queries and keys in MiniMax's models. They replace vLLM's code
only during a proof's slice, so chat keeps vLLM's. On a rank with all heads, vLLM computes these
norms element by element in float32, which passes over the memory ten times. Under tensor
parallelism vLLM has fused kernels of its own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from poc_core.arithmetic import fused
from workers.vllm.kernels.trial import OTHER_BITS, Trial, instead, is_right
from workers.vllm.release import custom_ops

# Smaller queries (in numbers) use vLLM's code: launching the kernels costs what they save.
LEAST = 1 << 22
# Rows of a trial.
_ROWS = 512

# (norm of queries, norm of keys, queries, keys) -> queries, keys.
Norms = Callable[[Any, Any, Tensor, Tensor], tuple[Tensor, Tensor]]


def in_one_pass(q_norm: Any, k_norm: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the normed queries and keys. A fused kernel, which adds in torch's order, computes
    each of the two norms. ValueError if the kernel does not support the shape of the rows.
    """
    # imported here: Triton comes with CUDA builds
    from workers.vllm.kernels.norms import can_norm, rms_norm

    if not (can_norm(q) and can_norm(k)):
        raise ValueError(f"rows of {q.shape[1]} and {k.shape[1]} numbers")
    return (
        rms_norm(q, q_norm.weight, q_norm.variance_epsilon),
        rms_norm(k, k_norm.weight, k_norm.variance_epsilon),
    )


class QuickNorms:
    """The norm kernels for one model. Stores for each shape whether a trial found them correct."""

    def __init__(self) -> None:
        self._class = custom_ops.query_and_key_norms()
        self._is_right = Trial[bool]()

    def bound(self) -> AbstractContextManager[None]:
        """Makes vLLM's model use the norm kernels inside the context."""
        return instead(self._class, "forward_qk", self._norms)

    def _norms(
        self, own: Norms, q_norm: Any, k_norm: Any, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        def why_not() -> str:
            rows = q_norm, k_norm, q[:_ROWS], k[:_ROWS]
            return "" if all(map(torch.equal, own(*rows), in_one_pass(*rows))) else OTHER_BITS

        is_ours = fused.is_on(q.device) and all(
            x.dim() == 2 and x.stride(1) == 1 and x.element_size() == 2 for x in (q, k)
        )
        key = (q.shape[1], k.shape[1], q.dtype, q_norm.weight.dtype)
        what = "the fused kernel for norms of queries and keys"
        if (
            is_ours
            and q.numel() >= LEAST
            and self._is_right.of(key, lambda: is_right(what, why_not))
        ):
            return in_one_pass(q_norm, k_norm, q, k)
        return own(q_norm, k_norm, q, k)
