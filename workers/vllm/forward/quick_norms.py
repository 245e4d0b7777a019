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
from workers.vllm import compat

logger = logging.getLogger(__name__)

# Numbers of the queries below which the kernels' launches cost what they spare.
LEAST = 1 << 22
# Rows of a trial.
_ROWS = 512

# (norm of queries, norm of keys, queries, keys) -> queries, keys.
Norms = Callable[[Any, Any, Tensor, Tensor], tuple[Tensor, Tensor]]


class QuickNorms:
    """The kernels of a model, with what their trials found."""

    def __init__(self) -> None:
        self._class = compat.query_and_key_norms()
        self._is_right: dict[Any, bool] = {}  # by what a trial is of

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
        if key not in self._is_right:
            if torch.cuda.is_current_stream_capturing():  # a trial waits for its outcome
                return own(q_norm, k_norm, q, k)
            self._is_right[key] = self._try(own, q_norm, k_norm, q[:_ROWS], k[:_ROWS])
        return (kernels if self._is_right[key] else own)(q_norm, k_norm, q, k)

    def _try(self, own: Norms, q_norm: Any, k_norm: Any, q: Tensor, k: Tensor) -> bool:
        """Whether the kernels' bits are those of vLLM's own; says so where not."""
        try:
            theirs, ours = own(q_norm, k_norm, q, k), kernels(q_norm, k_norm, q, k)
            if all(map(torch.equal, theirs, ours)):
                return True
            logger.warning("the fused kernels for queries' and keys' norms give other bits")
        except Exception as error:
            logger.warning("the fused kernels for norms cannot be used: %s", error)
        return False


def kernels(q_norm: Any, k_norm: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    from poc_core.fused.norms import rms_norm  # here: Triton comes with CUDA builds

    return (
        rms_norm(q, q_norm.weight, q_norm.variance_epsilon),
        rms_norm(k, k_norm.weight, k_norm.variance_epsilon),
    )
