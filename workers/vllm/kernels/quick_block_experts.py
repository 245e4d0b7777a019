"""Fused kernels for MoE experts in block FP8, which write rows in the order of the experts. They
replace vLLM's kernels only during a proof's slice, so chat keeps vLLM's. The first large call of
each shape tries several tiles, and uses the fastest whose results are bit-identical to vLLM's.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poc_core.arithmetic import fused
from workers.vllm.kernels.trial import Compute, Trial, instead, quickest
from workers.vllm.release import custom_ops

# Fewer tokens use vLLM's kernels: vLLM has other tiles for them, some of which add in another
# order, and a trial is not worth its time.
LEAST = 4096
# Alignment in bytes of memory that the kernels read in blocks.
ALIGNED = 16
ROWS = 128  # of a block of workers.vllm.kernels.block_gates and block_down
# Tiles for both products, whose blocks have equally many rows: rows; whether two groups of columns
# are summed at a time; blocks of rows that share weights; warps; stages. The fastest of 24 on an
# H200. None as the first tile: block_gates.py, only for scales that are powers of two. None as the
# second tile: block_down.py.
_Tile = tuple[int, bool, int, int, int]
TILES: tuple[tuple[_Tile | None, _Tile | None], ...] = (
    (None, None),
    ((128, True, 8, 16, 3), None),
    (None, (128, True, 16, 8, 3)),
    ((128, True, 8, 16, 3), (128, True, 16, 8, 3)),
    ((64, False, 16, 4, 3), (64, False, 16, 4, 3)),
)


class Call(NamedTuple):
    """The arguments with which vLLM calls the experts of a layer."""

    out: Tensor  # (tokens, columns), 16 bits
    x: Any  # workers.vllm.kernels.block_experts.Quantised
    first: Any
    second: Any
    # (tokens, experts per token), float32; `chosen` has the same shape, int32 or int64
    share: Tensor
    chosen: Tensor
    # memory for intermediate results: activations after the gates, second product
    spaces: tuple[Tensor, Tensor]
    # adds up a token's rows (tokens, experts per token, columns)
    add: Callable[[Tensor, Tensor], Any]
    gates: Any  # workers.vllm.kernels.block_experts.Gates

    @property
    def key(self) -> Any:
        """Identifies the shapes of a call. Calls with equal keys share the result of one trial,
        which compares the kernels with vLLM's.
        """
        shapes = self.first.numbers.shape, self.second.numbers.shape
        return len(self.out).bit_length(), self.chosen.shape[1], *shapes


class QuickApply(ABC):
    """Fused kernels that replace the method `apply` of a vLLM class for the experts of a layer."""

    def __init__(self, experts: Any | None) -> None:
        self._experts = experts
        # Read now, because a later replacement of `apply` may hide the signature.
        self._signature = None if experts is None else inspect.signature(experts.apply)

    def bound(self) -> AbstractContextManager[None]:
        """Makes vLLM's class use the kernels inside the context."""
        return instead(self._experts, "apply", self._apply)

    def _apply(self, own: Callable[..., Any], experts: Any, *args: Any, **named: Any) -> Any:
        assert self._signature is not None

        def by_vllm() -> Any:
            return own(experts, *args, **named)

        try:
            given = self._signature.bind(experts, *args, **named).arguments
            call = self.read(experts, given) if _is_plain(experts, given) else None
        except (AttributeError, KeyError, TypeError):  # the arguments of another release
            call = None
        return by_vllm() if call is None else self.compute(call, by_vllm)

    @abstractmethod
    def read(self, experts: Any, given: Mapping[str, Any]) -> Any | None:
        """Returns the arguments of a call of `apply`. Returns None, or raises AttributeError,
        KeyError or TypeError, if the kernels do not support the call.
        """

    @abstractmethod
    def compute(self, call: Any, by_vllm: Compute) -> Any:
        """Computes the experts with the kernels if a trial has found their results correct, else
        with `by_vllm`.
        """


def _is_plain(experts: Any, given: Mapping[str, Any]) -> bool:
    """Returns True if the kernels support this call of vLLM's experts: all experts are on this rank
    and have no biases or LoRA, the activation is SiLU, and the output is bfloat16.
    """
    kind, lora = given["activation"], getattr(experts, "_lora_context", None)
    others = given["expert_map"], given["a2_scale"], experts.w1_bias, experts.w2_bias, lora
    return (
        fused.is_on(given["hidden_states"].device)
        and getattr(kind, "value", kind) == "silu"
        and all(one is None for one in others)
        and not given["apply_router_weight_on_input"]
        and all(given[name].is_contiguous() for name in ("output", "topk_weights"))
        and given["output"].dtype is torch.bfloat16
        and given["topk_weights"].dtype is torch.float32
    )


class QuickBlockExperts(QuickApply):
    """The kernels for block FP8 experts of one model. Stores the fastest tiles for each shape."""

    def __init__(self) -> None:
        super().__init__(getattr(custom_ops.triton_experts(), "TritonExperts", None))
        self._tiles = Trial[Any]()  # by Call.key

    def read(self, experts: Any, given: Mapping[str, Any]) -> Call | None:
        x, config = given["hidden_states"], experts.quant_config
        limit, powers = custom_ops.limit_of_gates(experts), custom_ops.scales_are_powers()
        if (
            len(x) < LEAST
            or not (config.use_fp8_w8a8 and list(experts.block_shape or ()) == [128, 128])
            or getattr(experts, "quantization_emulation", False)
            or (limit is not None and not powers)
        ):
            return None
        from workers.vllm.kernels.block_experts import Gates, Quantised, can_multiply

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
        return call if can_multiply(call.x, call.first, call.second) else None

    def compute(self, call: Call, by_vllm: Compute) -> Any:
        best = self._tiles.of(call.key, lambda: _best(call, by_vllm))
        return by_vllm() if best is None else compute(call, *best)


def _best(call: Call, by_vllm: Compute) -> Any | None:
    """Returns the fastest pair of tiles for the two products. Returns None if vLLM's kernels are
    faster, or if no pair gives results that are bit-identical to vLLM's.
    """
    from workers.vllm.kernels.block_experts import Tile, can_multiply_down

    has_down = can_multiply_down(call.second)
    tiles = [
        (first and Tile(*first), second and Tile(*second))
        for first, second in TILES
        if (first or call.gates.powers) and (second or has_down)
    ]
    best = quickest(by_vllm, [partial(compute, call, *both) for both in tiles], call.out)
    return None if best is None else tiles[best]


def compute(call: Call, first: Any, second: Any) -> None:
    """Computes `call.out`. `first`, `second`: tiles of the two products, with equal row counts; see
    TILES.
    """
    from workers.vllm.kernels.block_experts import (
        Quantised,
        multiply_,
        open_gates_,
        rows_by_expert,
    )
    from workers.vllm.kernels.sorted_rows import sorted_rows

    n_experts, columns, middle = call.second.numbers.shape
    tokens, a_token = call.chosen.shape
    block = second.rows if second else ROWS
    rows = sorted_rows(call.chosen, block, n_experts)
    n = rows_by_expert(rows, block)
    opened = Quantised(
        memory(call.spaces[0], call.x.numbers.dtype, n, middle),
        call.x.scales.new_empty(middle // 128, n).t(),
    )
    if first is None:
        from workers.vllm.kernels import block_gates

        block_gates.open_gates_(opened, call.x, call.first, rows, a_token, call.gates.limit)
    else:
        open_gates_(opened, call.x, call.first, rows, a_token, first, call.gates)
    products = memory(call.spaces[1], call.out.dtype, tokens * a_token, columns)
    share = call.share.flatten()
    if second is None:
        from workers.vllm.kernels import block_down

        block_down.multiply_(products, opened, call.second, share, rows)
    else:
        multiply_(products, opened, call.second, share, rows, second)
    call.add(products.view(tokens, a_token, columns), call.out)


def memory(space: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Returns a (rows, columns) tensor in `space`, vLLM's memory. Allocates a new tensor if `space`
    is too small, or unsuitable for the kernels.
    """
    n = rows * columns
    has_room = space.numel() * space.element_size() >= n * dtype.itemsize
    if has_room and space.is_contiguous() and space.data_ptr() % ALIGNED == 0:
        return space.view(-1).view(dtype)[:n].view(rows, columns)
    return space.new_empty(rows, columns, dtype=dtype)
