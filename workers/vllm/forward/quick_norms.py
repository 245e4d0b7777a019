"""MiniMax's norms of queries and keys by fused kernels, for one slice: chat keeps vLLM's own.

vLLM computes them number by number in float32 where a rank has all heads: ten passes over memory.
Under tensor parallel it has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from poc_core import fused
from workers.vllm.forward.trial import OTHER_BITS, Trial, instead, is_right
from workers.vllm.release import custom_ops

# Numbers of the queries below which the kernels' launches cost what they spare.
LEAST = 1 << 22
# Rows of a trial.
_ROWS = 512

# (norm of queries, norm of keys, queries, keys) -> queries, keys.
Norms = Callable[[Any, Any, Tensor, Tensor], tuple[Tensor, Tensor]]


def in_one_pass(q_norm: Any, k_norm: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """By one kernel each, which adds in torch's order. ValueError: not of such rows."""
    from poc_core.fused.norms import can_norm, rms_norm  # here: Triton comes with CUDA builds

    if not (can_norm(q) and can_norm(k)):
        raise ValueError(f"rows of {q.shape[1]} and {k.shape[1]} numbers")
    return (
        rms_norm(q, q_norm.weight, q_norm.variance_epsilon),
        rms_norm(k, k_norm.weight, k_norm.variance_epsilon),
    )


class QuickNorms:
    """The kernels of a model, with what their trials found."""

    def __init__(self) -> None:
        self._class = custom_ops.query_and_key_norms()
        self._is_right = Trial[bool]()

    def bound(self) -> AbstractContextManager[None]:
        """Within, vLLM's model calls the kernels."""
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
