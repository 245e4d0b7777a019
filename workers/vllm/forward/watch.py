"""Watches a rank during self-tests: chat's caches, and outputs on tensor-parallel ranks."""

import torch
from torch import Tensor

from workers.vllm.forward.kv_isolation import ScratchCaches
from workers.vllm.release import parallel


class Watch:
    """A check of batches of up to `n_sequences` sequences of `seq_len` tokens, once created."""

    def __init__(self, caches: ScratchCaches, n_sequences: int, seq_len: int) -> None:
        self._caches = caches
        self._size = (n_sequences, seq_len)
        self._before = caches.chats_first_blocks(n_sequences, seq_len)
        # False with sparse attention: the next layer adds up its ranks' sums.
        self.replicated = True

    def look(self, hidden_states: Tensor) -> None:
        """Compares a layer's output on all ranks."""
        self.replicated &= parallel.is_replicated(hidden_states)

    def touched(self) -> list[str]:
        """Returns the layers whose chat cache has changed."""
        after = self._caches.chats_first_blocks(*self._size)
        return [
            name
            for name, blocks in after.items()
            if not all(map(torch.equal, blocks, self._before[name]))
        ]
