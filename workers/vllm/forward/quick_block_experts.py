"""A layer's experts in block FP8, with kernels that write in the order of the experts; bound only
during a proof's slice, so chat keeps vLLM's kernels.

The first large call of each shape tries several tiles and uses the fastest that gives vLLM's bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poc_core import fused
from workers.vllm.forward.trial import Compute, Trial, instead, quickest
from workers.vllm.release import custom_ops

# Fewer tokens use vLLM's kernels: vLLM has other tiles for them, some of which add in another
# order, and a trial is not worth its time.
LEAST = 4096
# Alignment in bytes of memory that the kernels read in blocks.
ALIGNED = 16
# Tiles for both products, whose blocks have equally many rows: rows; whether two groups of columns
# are summed at a time; blocks of rows that share weights; warps; stages. The fastest of 24 on an
# H200.
TILES = (
    ((128, True, 8, 16, 3), (128, True, 16, 8, 3)),
    ((64, False, 16, 4, 3), (64, False, 16, 4, 3)),
)


class Call(NamedTuple):
    """Arguments of vLLM's call of a layer's experts."""

    out: Tensor  # (tokens, columns), 16 bits
    x: Any  # poc_core.fused.block_experts.Quantised
    first: Any
    second: Any
    # (tokens, experts per token), float32; `chosen` has the same shape, int32 or int64
    share: Tensor
    chosen: Tensor
    # memory for intermediate results: activations after the gates, second product
    spaces: tuple[Tensor, Tensor]
    # adds up a token's rows (tokens, experts per token, columns)
    add: Callable[[Tensor, Tensor], Any]
    gates: Any  # poc_core.fused.block_experts.Gates

    @property
    def key(self) -> Any:
        """Returns the key of calls that share one trial."""
        shapes = self.first.numbers.shape, self.second.numbers.shape
        return len(self.out).bit_length(), self.chosen.shape[1], *shapes


class QuickBlockExperts:
    """The kernels for one model, with the results of their trials."""

    def __init__(self) -> None:
        module = custom_ops.triton_experts()
        self._experts = None if module is None else module.TritonExperts
        # Read before another stand-in hides the signature.
        self._signature = None if module is None else inspect.signature(module.TritonExperts.apply)
        self._tiles = Trial[Any]()  # by Call.key

    def bound(self) -> AbstractContextManager[None]:
        """Replaces vLLM's experts with the kernels inside the context."""
        return instead(self._experts, "apply", self._apply)

    def _apply(self, own: Callable[..., Any], experts: Any, *args: Any, **named: Any) -> Any:
        def by_own() -> Any:
            return own(experts, *args, **named)

        call = self._read(experts, *args, **named)
        best = None if call is None else self._tiles.of(call.key, lambda: _best(call, by_own))
        return by_own() if call is None or best is None else compute(call, *best)

    def _read(self, experts: Any, *args: Any, **named: Any) -> Call | None:
        """Returns the call's arguments; None if the kernels do not support the call."""
        assert self._signature is not None
        try:
            given = self._signature.bind(experts, *args, **named).arguments
            x, kind = given["hidden_states"], given["activation"]
            refused = given["expert_map"], given["a2_scale"], experts.w1_bias, experts.w2_bias
            config, lora = experts.quant_config, getattr(experts, "_lora_context", None)
            if (
                len(x) < LEAST
                or not fused.is_on(x.device)
                or not (config.use_fp8_w8a8 and list(experts.block_shape or ()) == [128, 128])
                or getattr(kind, "value", kind) != "silu"
                or any(one is not None for one in (*refused, lora))
                or given["apply_router_weight_on_input"]
                or getattr(experts, "quantization_emulation", False)
            ):
                return None
            limit, powers = custom_ops.limit_of_gates(experts), custom_ops.scales_are_powers()
            if limit is not None and not powers:
                return None
            from poc_core.fused.block_experts import Gates, Quantised, can_multiply

            call = Call(
                given["output"],
                Quantised(x, given["a1q_scale"]),
                Quantised(given["w1"], experts.w1_scale),
                Quantised(given["w2"], experts.w2_scale),
                given["topk_weights"],
                given["topk_ids"],
                (given["workspace13"], given["workspace2"]),
                experts.moe_sum,
                Gates(powers, limit or 0.0),
            )
            can = can_multiply(call.x, call.first, call.second)
        except (AttributeError, KeyError, TypeError):  # the arguments of another release
            return None
        is_ours = (
            can
            and all(one.is_contiguous() for one in (call.out, call.share))
            and (call.out.dtype, call.share.dtype) == (torch.bfloat16, torch.float32)
        )
        return call if is_ours else None


def _best(call: Call, by_own: Compute) -> Any | None:
    """Returns the fastest tiles of both products; None if vLLM's kernels are faster."""
    from poc_core.fused.block_experts import Tile

    tiles = [tuple(Tile(*one) for one in both) for both in TILES]
    best = quickest(by_own, [partial(compute, call, *both) for both in tiles], call.out)
    return None if best is None else tiles[best]


def compute(call: Call, first: Any, second: Any) -> None:
    """Computes call.out with a tile for each product; both tiles have equally many rows."""
    from poc_core.fused.block_experts import (
        Quantised,
        Rows,
        multiply_,
        open_gates_,
        rows_by_expert,
    )

    n_experts, columns, middle = call.second.numbers.shape
    tokens, a_token = call.chosen.shape
    rows = Rows(*custom_ops.rows_of_experts(call.chosen, first.rows, n_experts))
    n = rows_by_expert(rows, first)
    opened = Quantised(
        memory(call.spaces[0], call.x.numbers.dtype, n, middle),
        call.x.scales.new_empty(middle // 128, n).t(),
    )
    open_gates_(opened, call.x, call.first, rows, a_token, first, call.gates)
    products = memory(call.spaces[1], call.out.dtype, tokens * a_token, columns)
    multiply_(products, opened, call.second, call.share.flatten(), rows, second)
    call.add(products.view(tokens, a_token, columns), call.out)


def memory(space: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Returns a (rows, columns) tensor in vLLM's memory if that is large enough, else a new one."""
    n = rows * columns
    has_room = space.numel() * space.element_size() >= n * dtype.itemsize
    if has_room and space.is_contiguous() and space.data_ptr() % ALIGNED == 0:
        return space.view(-1).view(dtype)[:n].view(rows, columns)
    return space.new_empty(rows, columns, dtype=dtype)
