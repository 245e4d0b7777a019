"""Computes MXFP4 experts in bfloat16 if there are many rows. Replaces Marlin's kernels only during
a proof's slice, so chat keeps Marlin. POC_EXPERTS=exact disables it.

Marlin unpacks a weight again for each 64 rows. A proof's micro-batch has hundreds of rows per
expert: unpacking a layer's weights once and multiplying in 16 bits takes half the time. The numbers
are the same as in Marlin. POC_EXPERTS=same, the default, adds them in Marlin's order;
POC_EXPERTS=fast adds them in another order.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.vllm.forward.quick_block_experts import QuickApply, memory
from workers.vllm.forward.trial import Compute, Trial, is_right, milliseconds
from workers.vllm.release import custom_ops

SETTING, FAST, SAME = "POC_EXPERTS", "fast", "same"
# Smaller calls (tokens times experts per token) use Marlin: unpacking costs more than it saves.
LEAST = 1 << 16
# Largest relative distance from Marlin's result that the order of sums can explain.
_FURTHEST = 0.01
# Bytes of the GPU that must stay free next to the unpacked weights.
_SPARE = 2**30


class Way(NamedTuple):
    """A choice of tiles and of the order of addition for computing the expert products."""

    # For both products, the fields of poc_core.fused.experts.Tile: rows, columns and summed columns
    # of a block, blocks of rows that share weights, warps, stages, parts.
    tile: tuple[int, ...]
    # Marlin's division (poc_core.fused.marlin.Division) to imitate; None for other sums
    division: tuple[int, int] | None = None


# The fastest of nine tiles on an H200; then the ways with Marlin's sums, with both divisions that
# Marlin may choose for many rows. First the division that an H200 uses: a call that Marlin does not
# divide has the same bits with either.
_FAST = Way((128, 256, 64, 8, 8, 3))
SAME_WAYS = tuple(Way((128, 128, 32, 8, 8, 4, 2), one) for one in ((128, 2), (256, 1)))


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
    """The kernels for MXFP4 experts of one model. Stores for each shape which way a trial found
    correct.
    """

    def __init__(self) -> None:
        self._ways = {FAST: (_FAST,), SAME: SAME_WAYS}.get(os.environ.get(SETTING, SAME), ())
        super().__init__(custom_ops.marlin_experts() if self._ways else None)
        self._way = Trial[Way | None]()  # by tokens and Call.shapes
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

        across, deep = self._ways[0].tile[1:3]
        sizes = ((columns % across, depth % deep) for _, columns, depth in call.shapes)
        can = all(map(can_unpack, call.weights, call.scales)) and not any(map(any, sizes))
        return call if can else None

    def compute(self, call: Call, by_vllm: Compute) -> Any:
        key = len(call.x) if self._ways is SAME_WAYS else 0, call.shapes
        way = self._way.of(key, lambda: self._try(call, by_vllm))
        if way is None or self._unpacked is None:
            return by_vllm()
        return compute(call, self._unpacked, way)

    def _try(self, call: Call, own: Compute) -> Way | None:
        """Returns the first way that takes less time than Marlin and whose result equals Marlin's,
        or is as close as another order of addition allows. Returns None if there is no such way.
        """
        found: Way | None = None

        def why_not() -> str:
            nonlocal found
            largest = max(n * columns * depth for n, columns, depth in call.shapes)
            unpacked, words = self._unpacked, ""
            if unpacked is None or unpacked.numel() < largest:
                # Other shapes use this memory: it is freed only if a larger one fits.
                free = torch.cuda.mem_get_info()[0] + _spare_of_allocator()
                free += 0 if unpacked is None else 2 * unpacked.numel()
                if free < 2 * largest + _SPARE:
                    return (
                        f"take {2 * largest / 2**30:.1f} GiB of the GPU and {free / 2**30:.1f} GiB"
                        " are free; a smaller --gpu-memory-utilization makes room"
                    )
                unpacked = self._unpacked = None
                unpacked = self._unpacked = call.x.new_empty(largest)
            own()
            expected = call.out.clone()
            for way in self._ways:
                call.out.fill_(float("nan"))
                compute(call, unpacked, way)
                words = _difference(call.out, expected, 0.0 if way.division else _FURTHEST)
                if not words:
                    found = way
                    return words
            return words

        if is_right("a layer's unpacked experts", why_not) and found is not None:
            way = found
            assert self._unpacked is not None
            unpacked = self._unpacked
            if way.division is None:
                return way
            if milliseconds(lambda: compute(call, unpacked, way)) < milliseconds(own):
                return way
        if not any(self._way.found.values()):
            self._unpacked = None  # nothing uses this memory
        return None


def _difference(found: Tensor, expected: Tensor, furthest: float) -> str:
    """Returns why `found` is not used, or "" if its relative distance is at most `furthest`."""
    if torch.equal(found, expected):
        return ""
    found, expected = found.float(), expected.float()
    distance = float((found - expected).norm() / expected.norm())
    return "" if distance < furthest else f"lie {distance:.3g} apart from Marlin's: not used"


def compute(call: Call, unpacked: Tensor, way: Way) -> None:
    """Computes `call.out`. `unpacked`: memory for the unpacked weights of one product at a time."""
    from poc_core.fused.experts import (
        Opening,
        Rows,
        Tile,
        open_by_expert_,
        product_by_expert_,
        rows_by_expert,
    )
    from poc_core.fused.marlin import ROWS, Division, last_tiles_, places, unpack_
    from poc_core.fused.row_order import in_order

    tile = Tile(*way.tile)
    first, second = (
        unpacked[: n * columns * depth].view(n, columns, depth) for n, columns, depth in call.shapes
    )
    tokens, a_token = call.chosen.shape
    n_rows, n_experts = tokens * a_token, len(first)
    rows = Rows(*custom_ops.rows_of_experts(call.chosen, tile.rows, n_experts))
    n = rows_by_expert(rows, tile)
    opened = memory(call.spaces[0], call.x.dtype, n, second.shape[2])
    products = memory(call.spaces[1], call.x.dtype, n_rows, second.shape[1])
    share = call.share.flatten().to(call.x.dtype)
    opening = Opening(a_token, call.limit)
    unpack_(first, call.weights[0], call.scales[0], pairs=True)
    open_by_expert_(opened, call.x, first, rows, tile, opening)
    if way.division:
        division, block = Division(*way.division), ROWS.value
        of_marlin = Rows(*custom_ops.rows_of_experts(call.chosen, block, n_experts))
        of_marlin = of_marlin._replace(ids=in_order(*of_marlin, block))
        place = places(rows, n_rows)
        last_tiles_(opened, call.x, first, share, of_marlin, place, division, opening)
    unpack_(second, call.weights[1], call.scales[1])
    product_by_expert_(products, opened, second, share, rows, tile)
    if way.division:
        last_tiles_(products, opened, second, share, of_marlin, place, division)
    call.add(products.view(tokens, a_token, -1))


def _spare_of_allocator() -> int:
    """Returns how many bytes torch's allocator has reserved but does not use."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
