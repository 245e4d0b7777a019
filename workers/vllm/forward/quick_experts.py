"""Products of experts in 16 bits by kernels that open gates as they write, for one slice: chat
keeps vLLM's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poc_core import fused
from workers.vllm import compat

logger = logging.getLogger(__name__)

# Numbers of the input below which vLLM's tiles are others, and a trial is not worth its time.
LEAST = 1 << 22
# Of a trial: every so many rows are compared, and each way is timed so often.
_EVERY, _TIMES = 61, 3

# Arguments of vLLM's products by numbers of other formats.
_QUANTISED = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
# A tile's numbers by vLLM's names, and what Triton takes where vLLM says nothing.
TILE = {
    "BLOCK_SIZE_M": 0,
    "BLOCK_SIZE_N": 0,
    "BLOCK_SIZE_K": 0,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}

Compute = Callable[[], Any]


class Product(NamedTuple):
    """A product that vLLM asks for: its result's place, and what is multiplied how."""

    out: Tensor
    x: Tensor
    weights: Tensor
    share: Tensor | None
    rows: Any  # poc_core.fused.experts.Rows, as is Tile
    a_token: int
    tile: Any
    own: Compute  # vLLM's kernel, to the same place

    def by_ours(self, out: Tensor, opens: bool) -> None:
        from poc_core.fused.experts import product_  # here: Triton comes with CUDA builds

        product_(
            out, self.x, self.weights, self.share, self.rows, self.a_token, self.tile, opens
        )  # fmt: skip

    @property
    def key(self) -> Any:
        """What another product shares for which the same trial holds."""
        n_rows = len(self.x).bit_length()
        return n_rows, self.x.dtype, self.weights.shape, self.a_token, self.tile


class QuickExperts:
    """The kernels of a model, with what their trials found."""

    def __init__(self) -> None:
        self._module = compat.triton_experts()
        self._is_better: dict[Any, bool] = {}  # by what a trial is of
        # Within a layer's experts: their first product, which waits for the gates' turn.
        self._waiting: Product | None = None
        self._may_wait = False

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Within, vLLM's experts call the kernels."""
        if self._module is None:
            yield
            return
        module, experts = self._module, self._module.TritonExperts
        apply, activation = experts.apply, vars(experts).get("activation")
        gates, product = experts.activation, module.invoke_fused_moe_triton_kernel
        experts.apply = lambda *args, **named: self._apply(apply, *args, **named)
        experts.activation = lambda *args, **named: self._activation(gates, *args, **named)
        module.invoke_fused_moe_triton_kernel = lambda *args, **named: self._product(
            product, *args, **named
        )
        try:
            yield
        finally:
            module.invoke_fused_moe_triton_kernel, experts.apply = product, apply
            if activation is None:
                del experts.activation
            else:
                experts.activation = activation

    def _apply(self, own: Callable[..., Any], experts: Any, *args: Any, **named: Any) -> Any:
        self._may_wait = getattr(experts, "_lora_context", None) is None
        try:
            found = own(experts, *args, **named)
            if self._waiting is not None:
                raise RuntimeError("vLLM's experts did not open the gates of their first product")
            return found
        finally:
            self._waiting, self._may_wait = None, False

    def _product(self, own: Callable[..., Any], *args: Any, **named: Any) -> None:
        product = self._read(own, args, named)
        if product is None:
            own(*args, **named)
        elif product.share is None:
            self._waiting = product
        else:
            out = product.out.view(-1, product.out.shape[-1])
            self._compute(product, product.own, lambda: product.by_ours(out, False), out)

    def _read(
        self, own: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Product | None:
        """None: not a product of these kernels."""
        if len(args) != 12 or not self._may_wait or any(named.get(name) for name in _QUANTISED):
            return None
        x, weights, out, *scales, share, ids, experts, n, shares, a_token, config = args
        if (
            any(one is not None for one in (*scales, named.get("B_bias"), named.get("block_shape")))
            or ids is None
            or shares != (share is not None)
            or x.numel() < LEAST
            or not fused.is_on(x.device)
        ):
            return None
        from poc_core.fused.experts import Rows, Tile, can_multiply

        tile = Tile(*(config.get(name, other) for name, other in TILE.items()))
        if not can_multiply(x, weights, tile) or not out.is_contiguous():
            return None
        share = None if share is None else share.view(-1)
        return Product(
            out, x, weights, share, Rows(ids, experts, n), a_token, tile,
            lambda: own(*args, **named),
        )  # fmt: skip

    def _activation(
        self, own: Callable[..., Any], experts: Any, kind: Any, output: Tensor, given: Tensor,
        **named: Any,
    ) -> None:  # fmt: skip
        def by_own() -> None:
            own(experts, kind, output, given, **named)

        product, self._waiting = self._waiting, None
        if product is None:
            by_own()
            return

        def both() -> None:
            product.own()
            by_own()

        is_ours = (
            getattr(kind, "value", kind) == "silu"
            and not any(_clamps(experts))
            and given.data_ptr() == product.out.data_ptr()
            and output.is_contiguous()
            and 2 * output.shape[-1] == product.weights.shape[1]
        )
        if is_ours:
            self._compute(product, both, lambda: product.by_ours(output, True), output)
        else:
            both()

    def _compute(self, product: Product, own: Compute, ours: Compute, out: Tensor) -> None:
        """The better of the two; it ends with the result in its place."""
        if product.key not in self._is_better:
            if torch.cuda.is_current_stream_capturing():  # a trial waits for its outcome
                own()
                return
            self._is_better[product.key] = better(own, ours, out)
        (ours if self._is_better[product.key] else own)()


def _clamps(experts: Any) -> list[bool]:
    """Whether numbers before or after the gates are bounded, as each release says it."""
    said = (("quant_config", "gemm1_clamp_limit"), ("activation_config", "clamp_limit"))
    return [getattr(getattr(experts, of, None), name, None) is not None for of, name in said]


def better(own: Compute, ours: Compute, out: Tensor) -> bool:
    """Whether `ours` writes the bits that `own` writes to out (rows, ...), and in less time."""
    try:
        own()
        expected = out[::_EVERY].clone()
        own_ms = milliseconds(own)
        out.fill_(float("nan"))
        ours()
        if not torch.equal(out[::_EVERY], expected):
            logger.warning("the kernel for products of experts gives other bits: not used")
            return False
        return milliseconds(ours) < own_ms
    except Exception as error:
        logger.warning("the kernel for products of experts cannot be used: %s", error)
        return False


def milliseconds(compute: Compute) -> float:
    """The device's time, the shortest of a few."""
    times = []
    for _ in range(_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
