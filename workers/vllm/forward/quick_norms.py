"""MiniMax's norms of queries and keys by fused kernels, for one slice: chat keeps vLLM's own.

vLLM computes them number by number in float32 where a rank has all heads: ten passes over memory.
Under tensor parallel it has kernels of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from poc_core import fused
from workers.vllm.release import custom_ops

logger = logging.getLogger(__name__)

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
        self._ways: dict[Any, Norms] = {}  # by what a trial is of

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Within, vLLM's model calls the kernels."""
        if self._class is None:
            yield
            return
        own: Norms = self._class.forward_qk
        self._class.forward_qk = staticmethod(lambda *args: self._norms(own, *args))
        try:
            yield
        finally:
            self._class.forward_qk = staticmethod(own)

    def _norms(
        self, own: Norms, q_norm: Any, k_norm: Any, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        is_ours = fused.is_on(q.device) and all(
            x.dim() == 2 and x.stride(1) == 1 and x.element_size() == 2 for x in (q, k)
        )
        if not is_ours or q.numel() < LEAST:
            return own(q_norm, k_norm, q, k)
        key = (q.shape[1], k.shape[1], q.dtype, q_norm.weight.dtype)
        if key not in self._ways:
            if torch.cuda.is_current_stream_capturing():  # a trial waits for its outcome
                return own(q_norm, k_norm, q, k)
            self._ways[key] = self._found(own, q_norm, k_norm, q[:_ROWS], k[:_ROWS])
        return self._ways[key](q_norm, k_norm, q, k)

    def _found(self, own: Norms, q_norm: Any, k_norm: Any, q: Tensor, k: Tensor) -> Norms:
        """The kernels, where their bits are those of vLLM's own; else vLLM's own."""
        theirs = own(q_norm, k_norm, q, k)
        try:
            if all(map(torch.equal, theirs, in_one_pass(q_norm, k_norm, q, k))):
                return in_one_pass
            why = "give other bits"
        except Exception as error:
            why = f"cannot be used: {error}"
        logger.warning("norms of queries and keys: the kernels %s", why)
        return own
