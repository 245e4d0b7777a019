"""Computes MXFP4 experts in bfloat16 if there are many rows. Replaces Marlin's kernels only during
a proof's slice, so chat keeps Marlin. Enabled by POC_EXPERTS=fast.

Marlin unpacks a weight again for each 64 rows. A proof's micro-batch has hundreds of rows per
expert: unpacking a layer's weights once and multiplying in 16 bits takes half the time. The numbers
are the same as in Marlin, but are added in another order.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.vllm.forward.quick_block_experts import QuickApply, memory
from workers.vllm.forward.trial import Compute, Trial, is_right
from workers.vllm.release import custom_ops

SETTING, ON = "POC_EXPERTS", "fast"
# Smaller calls (tokens times experts per token) use Marlin: unpacking costs more than it saves.
LEAST = 1 << 16
# Largest relative distance from Marlin's result that the order of sums can explain.
_FURTHEST = 0.01
# Bytes of the GPU that must stay free next to the unpacked weights.
_SPARE = 2**30
# For both products: rows, columns and summed columns of a block, blocks of rows that share weights,
# warps, stages. The fastest of nine on an H200.
_TILE = (128, 256, 64, 8, 8, 3)


class Call(NamedTuple):
    """The arguments with which vLLM calls the experts of a layer."""

    out: Tensor  # (tokens, columns), 16 bits
    x: Tensor  # like `out`
    weights: tuple[Tensor, Tensor]  # of both products, in Marlin's layout
    scales: tuple[Tensor, Tensor]
    # (tokens, experts per token), float32; `chosen` has the same shape, int32 or int64
    share: Tensor
    chosen: Tensor
    # memory for the activations after the gates, and for the second product
    spaces: tuple[Tensor, Tensor]
    # adds up a token's rows (tokens, experts per token, columns) to `out`
    add: Callable[[Tensor], Any]
    limit: float  # clamp limit of the gates; 0 for none

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """The shapes of both products' weights: (experts, columns, summed columns)."""
        found = [(*one.shape, one.shape[2] // 2, one.shape[1] * 16) for one in self.weights]
        return tuple((one[0], one[3], one[4]) for one in found)


class QuickMarlin(QuickApply):
    """The kernels for MXFP4 experts of one model. Stores for each shape whether a trial found the
    kernels correct.
    """

    def __init__(self) -> None:
        super().__init__(custom_ops.marlin_experts() if os.environ.get(SETTING) == ON else None)
        self._is_right = Trial[bool]()  # by Call.shapes
        self._unpacked: Tensor | None = None  # memory of one product's weights

    def read(self, experts: Any, given: Mapping[str, Any]) -> Call | None:
        out, x, chosen = given["output"], given["hidden_states"], given["topk_ids"]
        more = getattr(experts, "activation_config", None)
        others = experts.g1_alphas, experts.g2_alphas, experts.input_dtype
        if (
            chosen.numel() < LEAST
            or not experts.quant_config.use_mxfp4_w4a16
            or x.dtype is not torch.bfloat16
            or not x.is_contiguous()
            or (getattr(more, "alpha", 1.0), getattr(more, "beta", 0.0)) != (1.0, 0.0)
            or any(one is not None for one in others)
            or torch.cuda.is_current_stream_capturing()
        ):
            return None
        call = Call(
            out, x, (given["w1"], given["w2"]), (experts.w1_scale, experts.w2_scale),
            given["topk_weights"], chosen, (given["workspace13"], given["workspace2"]),
            lambda rows: custom_ops.sum_of_experts(experts, rows, out, chosen),
            custom_ops.limit_of_gates(experts) or 0.0,
        )  # fmt: skip
        from poc_core.fused.marlin import can_unpack

        sizes = ((columns % _TILE[1], depth % _TILE[2]) for _, columns, depth in call.shapes)
        can = all(map(can_unpack, call.weights, call.scales)) and not any(map(any, sizes))
        return call if can else None

    def compute(self, call: Call, by_vllm: Compute) -> Any:
        if not self._is_right.of(call.shapes, lambda: self._try(call, by_vllm)):
            return by_vllm()
        assert self._unpacked is not None
        return compute(call, self._unpacked)

    def _try(self, call: Call, own: Compute) -> bool:
        """Returns True if the kernels' result is as near to Marlin's as another order of addition
        allows.
        """
        largest = max(n * columns * depth for n, columns, depth in call.shapes)

        def why_not() -> str:
            if self._unpacked is None or self._unpacked.numel() < largest:
                self._unpacked = None
                free = torch.cuda.mem_get_info()[0] + _spare_of_allocator()
                if free < 2 * largest + _SPARE:
                    return (
                        f"take {2 * largest / 2**30:.1f} GiB of the GPU and {free / 2**30:.1f} GiB"
                        " are free; a smaller --gpu-memory-utilization makes room"
                    )
                self._unpacked = call.x.new_empty(largest)
            own()
            expected = call.out.float()
            call.out.fill_(float("nan"))
            compute(call, self._unpacked)
            distance = float((call.out.float() - expected).norm() / expected.norm())
            return (
                "" if distance < _FURTHEST else f"lie {distance:.3g} apart from Marlin's: not used"
            )

        return is_right("a layer's unpacked experts", why_not)


def compute(call: Call, unpacked: Tensor) -> None:
    """Computes `call.out`. `unpacked`: memory for the unpacked weights of one product at a time."""
    from poc_core.fused.experts import (
        Opening,
        Rows,
        Tile,
        open_by_expert_,
        product_by_expert_,
        rows_by_expert,
    )
    from poc_core.fused.marlin import unpack_

    tile = Tile(*_TILE)
    first, second = (
        unpacked[: n * columns * depth].view(n, columns, depth) for n, columns, depth in call.shapes
    )
    tokens, a_token = call.chosen.shape
    rows = Rows(*custom_ops.rows_of_experts(call.chosen, tile.rows, len(first)))
    n = rows_by_expert(rows, tile)
    opened = memory(call.spaces[0], call.x.dtype, n, second.shape[2])
    unpack_(first, call.weights[0], call.scales[0], pairs=True)
    open_by_expert_(opened, call.x, first, rows, tile, Opening(a_token, call.limit))
    products = memory(call.spaces[1], call.x.dtype, tokens * a_token, second.shape[1])
    unpack_(second, call.weights[1], call.scales[1])
    share = call.share.flatten().to(call.x.dtype)
    product_by_expert_(products, opened, second, share, rows, tile)
    call.add(products.view(tokens, a_token, -1))


def _spare_of_allocator() -> int:
    """Returns how many bytes torch's allocator has reserved but does not use."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
