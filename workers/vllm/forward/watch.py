"""Checks a rank's proofs during self-tests: whether they change chat's caches, and whether the
outputs of layers are equal on all tensor-parallel ranks.
"""

import torch
from torch import Tensor

from workers.vllm.forward.kv_isolation import ScratchCaches
from workers.vllm.release import parallel


class Watch:
    """A check of the batches that are computed after its creation: whether they change chat's
    caches, and whether layers' outputs are equal on all ranks. A batch has up to `n_sequences`
    sequences of `seq_len` tokens.
    """

    def __init__(self, caches: ScratchCaches, n_sequences: int, seq_len: int) -> None:
        self._caches = caches
        self._size = (n_sequences, seq_len)
        self._before = caches.chats_first_blocks(n_sequences, seq_len)
        # False with sparse attention, where the next layer adds up the ranks' partial sums.
        self.replicated = True

    def look(self, hidden_states: Tensor) -> None:
        """Sets `replicated` to False if a layer's output differs between tensor-parallel ranks."""
        self.replicated &= parallel.is_replicated(hidden_states)

    def touched(self) -> list[str]:
        """Returns the names of the layers whose chat cache has changed."""
        after = self._caches.chats_first_blocks(*self._size)
        return [
            name
            for name, blocks in after.items()
            if not all(map(torch.equal, blocks, self._before[name]))
        ]
