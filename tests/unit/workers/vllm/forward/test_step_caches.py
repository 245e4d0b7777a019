"""Caches of decode steps after a lack of memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness.marks import needs_vllm

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM

BLOCK = 4


class Scratch:
    """Scratch caches of one layer, for which memory is short of more than `most` tokens."""

    groups = (SimpleNamespace(block_size=BLOCK, is_state=False),)
    most = 1 << 20

    def new_caches(self, _n: int, n_tokens: int, _zeros: Any) -> dict[str, list[torch.Tensor]]:
        if n_tokens > self.most:
            raise RuntimeError("not enough memory: you tried to allocate")
        return {"attn": [torch.zeros(n_tokens)]}

    def scratch_bytes_per_token(self) -> int:
        return 4

    def scratch_bytes_per_state(self) -> int:
        return 0

    def n_new_caches(self) -> int:
        return 1

    def clear(self, *_caches: Any) -> None: ...


def test_no_micro_batch_uses_chats_caches_after_a_larger_one_lacked_memory() -> None:
    from workers.vllm.forward.step_caches import StepCaches

    scratch: Any = Scratch()
    kept = StepCaches(scratch, torch.device("cpu"))
    kept.reserve(1, 1024)
    kept.free(kept.take(2, BLOCK))
    scratch.most = 4 * BLOCK
    with pytest.raises(RuntimeError, match="not enough memory"):
        kept.take(8, BLOCK)
    kept.free_all()
    place = kept.take(2, BLOCK)
    assert place.caches["attn"][0].shape == (2 * BLOCK,)  # else the layers keep chat's caches bound
