"""Computes MXFP4 experts with kernels for many rows. Replaces Marlin's kernels only during a
proof's slice, so chat keeps Marlin. POC_EXPERTS=exact disables it.

A proof's micro-batch has hundreds of rows per expert. Marlin unpacks a weight again for each 64
rows, and uses the tensor cores' instructions of older GPUs. The numbers are the same as in Marlin,
and are added in Marlin's order.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.vllm.kernels.quick_block_experts import QuickApply, memory
from workers.vllm.kernels.trial import OTHER_BITS, Compute, Trial, is_right, milliseconds
from workers.vllm.release import custom_ops

SETTING, SAME = "POC_EXPERTS", "same"
# Smaller calls (tokens times experts per token) use Marlin: a trial is not worth its time.
LEAST = 1 << 16
# Compute capability of the GPUs whose instructions the kernel uses.
_HOPPER = 9

# Marlin's division (workers.vllm.kernels.marlin.Division) of the first and of the second product.
Divisions = tuple[tuple[int, int], ...]

# The divisions that Marlin may choose for many rows, of either product.
EVERY: tuple[Divisions, ...] = tuple(product(((128, 2), (256, 1)), repeat=2))
# Further trials of a shape if several divisions have Marlin's bits. Marlin divides no tile for some
# numbers of rows, and the routing changes these numbers with each call.
MOST_TIES = 8


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
    def key(self) -> Any:
        """Identifies the shapes of a call. Calls with equal keys share the result of a trial."""
        return self.chosen.shape, *(one.shape for one in self.weights)


class QuickMarlin(QuickApply):
    """The kernels for MXFP4 experts of one model. Stores for each shape which divisions a trial
    found correct.
    """

    def __init__(self) -> None:
        is_on = os.environ.get(SETTING, SAME) == SAME
        super().__init__(custom_ops.marlin_experts() if is_on else None)
        # Both by Call.key; the key of `_found` also has the number of earlier ties.
        self._found = Trial[Divisions | None]()
        self._ties = Counter[Any]()

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
            or torch.cuda.get_device_capability(x.device)[0] != _HOPPER
            or torch.cuda.is_current_stream_capturing()
        ):
            return None
        call = Call(
            out, x, (given["w1"], given["w2"]), (experts.w1_scale, experts.w2_scale),
            given["topk_weights"], chosen, (given["workspace13"], given["workspace2"]),
            lambda rows: custom_ops.sum_of_experts(experts, rows, out, chosen),
            custom_ops.limit_of_gates(experts) or 0.0,
        )  # fmt: skip
        from workers.vllm.kernels.marlin import can_multiply

        return call if all(map(can_multiply, call.weights, call.scales)) else None

    def compute(self, call: Call, by_vllm: Compute) -> Any:
        key = call.key, self._ties[call.key]
        found = self._found.of(key, lambda: self._try(call, by_vllm))
        return by_vllm() if found is None else compute(call, found)

    def _try(self, call: Call, own: Compute) -> Divisions | None:
        """Returns the divisions whose result equals Marlin's, if no others are right and the kernel
        is faster than Marlin. Returns None otherwise. If several are right, the next call with this
        key is a trial too, because their results may differ in that call.
        """
        found: Divisions | None = None

        def why_not() -> str:
            nonlocal found
            right: list[Divisions] = []
            own()
            expected = call.out.clone()
            for divisions in EVERY:
                call.out.fill_(float("nan"))
                compute(call, divisions)
                if torch.equal(call.out, expected):
                    right.append(divisions)
            if len(right) > 1:
                self._ties[call.key] = min(self._ties[call.key] + 1, MOST_TIES)
            elif right:
                ours = milliseconds(lambda: compute(call, right[0]))
                found = right[0] if ours < milliseconds(own) else None
            return "" if right else OTHER_BITS

        is_right("the kernel for experts in 4 bits", why_not)
        return found


def compute(call: Call, divisions: Divisions) -> None:
    """Computes `call.out`."""
    from workers.vllm.kernels import marlin_products
    from workers.vllm.kernels.experts import rows_by_expert
    from workers.vllm.kernels.marlin import ROWS, Division, Opening, last_tiles_, places
    from workers.vllm.kernels.sorted_rows import sorted_rows

    of_first, of_second = (Division(*one) for one in divisions)
    first, second = zip(call.weights, call.scales, strict=True)
    n_experts, columns = len(second[0]), second[0].shape[2] // 2
    tokens, a_token = call.chosen.shape
    n_rows, middle = tokens * a_token, second[0].shape[1] * 16
    rows = sorted_rows(call.chosen, marlin_products.ROWS, n_experts)
    n = rows_by_expert(rows, marlin_products.ROWS)
    opened = memory(call.spaces[0], call.x.dtype, n, middle)
    products = memory(call.spaces[1], call.x.dtype, n_rows, columns)
    share = call.share.flatten().to(call.x.dtype)
    opening = Opening(a_token, call.limit)
    of_marlin = sorted_rows(call.chosen, ROWS.value, n_experts)
    place = places(rows, n_rows)
    marlin_products.multiply_(opened, call.x, *first, share, rows, opening)
    last_tiles_(opened, call.x, *first, share, of_marlin, place, of_first, opening)
    marlin_products.multiply_(products, opened, *second, share, rows)
    last_tiles_(products, opened, *second, share, of_marlin, place, of_second)
    call.add(products.view(tokens, a_token, -1))
