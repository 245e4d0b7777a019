"""Fused kernels for MoE experts in 16 bits: matrix products and the activation between them. They
replace vLLM's kernels only during a proof's slice, so chat keeps vLLM's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poc_core.arithmetic import fused
from workers.vllm.kernels.trial import Compute, Trial, instead, quickest
from workers.vllm.release import custom_ops

# Smaller inputs (in numbers) use vLLM's kernels, with other tiles: not worth a trial.
LEAST = 1 << 22
# Arguments of vLLM's products with quantised numbers.
_QUANTISED = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
# A tile's numbers by vLLM's names, and Triton's defaults where vLLM sets none.
TILE = {
    "BLOCK_SIZE_M": 0,
    "BLOCK_SIZE_N": 0,
    "BLOCK_SIZE_K": 0,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


class Product(NamedTuple):
    """A matrix product that vLLM requests for a layer's experts, with its operands, output and
    tile.
    """

    out: Tensor
    x: Tensor
    weights: Tensor
    share: Tensor | None
    rows: Any  # workers.vllm.kernels.experts.Rows; `tile` is a Tile of the same module
    a_token: int
    tile: Any
    own: Compute  # vLLM's kernel, with the same output

    def by_ours(self, out: Tensor, by_expert: bool = False) -> None:
        from workers.vllm.kernels.experts import (
            product_,  # imported here: Triton comes with CUDA builds
        )

        product_(
            out, self.x, self.weights, self.share, self.rows, self.a_token, self.tile, by_expert
        )  # fmt: skip

    def of_opened(self, out: Tensor, opened: Tensor) -> None:
        """Computes this product, the second of a layer, and writes it to `out`. `opened`: the
        result of the first product and the activation, with rows in the order of experts.
        """
        from workers.vllm.kernels.experts import product_by_expert_

        assert self.share is not None
        product_by_expert_(out, opened, self.weights, self.share, self.rows, self.tile)

    @property
    def key(self) -> Any:
        """Identifies the shapes of a product. Products with equal keys share the result of one
        trial, which compares our kernels with vLLM's.
        """
        n_rows = len(self.x).bit_length()
        return n_rows, self.x.dtype, self.weights.shape, self.a_token, self.tile


class Opened(NamedTuple):
    """A layer's first expert product together with the activation that follows it."""

    product: Product
    out: Tensor  # where vLLM's second product reads it
    room: Tensor  # memory for the same rows in the order of experts, overlapping `out`
    by_expert: bool  # True: the result is in `room`
    compute: Compute  # writes the result to `out`


class QuickExperts:
    """The kernels for 16-bit experts of one model. Stores for each shape whether a trial found the
    kernels correct and faster than vLLM's.
    """

    def __init__(self) -> None:
        self._module = custom_ops.triton_experts()
        self._trials = Trials(Trial(), Trial())
        self._layer: LayerCall | None = None  # the layer in progress

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Makes vLLM's experts use the kernels inside the context."""
        experts = None if self._module is None else self._module.TritonExperts
        with (
            instead(experts, "apply", self._apply),
            instead(experts, "activation", self._activation),
            instead(self._module, "invoke_fused_moe_triton_kernel", self._product),
        ):
            yield

    def _apply(self, own: Callable[..., Any], experts: Any, *args: Any, **named: Any) -> Any:
        if getattr(experts, "_lora_context", None) is not None:
            return own(experts, *args, **named)
        # This rank has no weights of other ranks' experts.
        has_all = named.get("expert_map") is None
        self._layer = LayerCall(self._trials, named.get("workspace13") if has_all else None)
        try:
            found = own(experts, *args, **named)
            if not self._layer.is_done:
                raise RuntimeError("vLLM's experts left out a step after their first product")
            return found
        finally:
            self._layer = None

    def _product(self, own: Callable[..., Any], *args: Any, **named: Any) -> None:
        if self._layer is None:
            own(*args, **named)
        else:
            self._layer.multiply(_read(own, args, named), lambda: own(*args, **named))

    def _activation(
        self, own: Callable[..., Any], experts: Any, kind: Any, output: Tensor, given: Tensor,
        **named: Any,
    ) -> None:  # fmt: skip
        def by_vllm() -> None:
            own(experts, kind, output, given, **named)

        is_silu = getattr(kind, "value", kind) == "silu"
        if self._layer is None:
            by_vllm()
        else:
            is_ours = is_silu and custom_ops.limit_of_gates(experts) is None
            self._layer.open_gates(output, given, by_vllm, is_ours)


class Trials(NamedTuple):
    """Results of trials by Product.key: True if our kernels are correct and faster than vLLM's."""

    is_better: Trial[bool]
    # for both products, with the first one written in the order of experts
    is_better_by_expert: Trial[bool]


class LayerCall:
    """One computation of a layer's experts: a product, an activation, and a second product."""

    def __init__(self, trials: Trials, space: Tensor | None) -> None:
        """`space`: vLLM's memory for the activation's output; None if it cannot be used."""
        self._trials = trials
        self._space = space
        self._waiting: Product | None = None  # the first product, until its activation is requested
        # the first product after its activation, if it can be written in the order of experts
        self._opened: Opened | None = None

    @property
    def is_done(self) -> bool:
        return self._waiting is None and self._opened is None

    def multiply(self, product: Product | None, own: Compute) -> None:
        """Computes the layer's second product at once. Stores the first product until open_gates
        computes it together with the activation.

        `product`: the product that vLLM requests; None if only vLLM's kernel `own` supports it.
        """
        opened, self._opened = self._opened, None
        if opened is not None and not _follows(product, opened):
            if opened.by_expert:
                opened.compute()
            opened = None
        if product is None:
            own()
        elif product.share is None:
            self._waiting = product
        else:
            self._second(product, opened)

    def _second(self, product: Product, opened: Opened | None) -> None:
        out = product.out.view(-1, product.out.shape[-1])
        if opened is not None and opened.by_expert:
            product.of_opened(out, opened.room)
            return
        way = self._way(product, product.own, lambda: product.by_ours(out), out)
        way()
        if opened is None:
            return
        first = opened

        def by_row() -> None:
            first.compute()
            way()

        def by_expert() -> None:
            first.product.by_ours(first.room, by_expert=True)
            product.of_opened(out, first.room)

        def find() -> bool:
            return quickest(by_row, [by_expert], out) is not None

        if not self._trials.is_better_by_expert.of(first.product.key, find):
            by_row()

    def open_gates(self, output: Tensor, given: Tensor, own: Compute, is_ours: bool) -> None:
        """Computes the layer's first product and the activation. `output`: receives the result.
        `given`: the activation's input in vLLM. `own`: vLLM's kernel for the activation. `is_ours`:
        True if our kernels support the activation.
        """
        product, self._waiting = self._waiting, None
        if product is None:
            own()
            return

        def both() -> None:
            product.own()
            own()

        if not (
            is_ours
            and given.data_ptr() == product.out.data_ptr()
            and output.is_contiguous()
            and 2 * output.shape[-1] == product.weights.shape[1]
        ):
            both()
            return
        is_better = self._trials.is_better_by_expert.found.get(product.key)  # None: not yet tried
        room = None if is_better is False else self._room(product, output)
        if room is not None and is_better:
            product.by_ours(room, by_expert=True)
            way: Compute = both
        else:
            way = self._way(product, both, lambda: product.by_ours(output), output)
            way()
        if room is not None:
            self._opened = Opened(product, output, room, bool(is_better), way)

    def _room(self, product: Product, output: Tensor) -> Tensor | None:
        """Returns a tensor in vLLM's memory for the activation's output, with rows in the order of
        experts. Returns None if the memory is too small or unsuitable.
        """
        from workers.vllm.kernels.experts import rows_by_expert

        space, columns = self._space, output.shape[1]
        n = rows_by_expert(product.rows, product.tile.rows)
        if (
            space is None
            or space.dtype != output.dtype
            or not space.is_contiguous()
            or space.data_ptr() != output.data_ptr()
            or space.numel() < n * columns
            or torch.cuda.is_current_stream_capturing()  # a trial waits for its result
        ):
            return None
        return space.view(-1)[: n * columns].view(n, columns)

    def _way(self, product: Product, own: Compute, ours: Compute, out: Tensor) -> Compute:
        def find() -> bool:
            return quickest(own, [ours], out) is not None

        return ours if self._trials.is_better.of(product.key, find) else own


def _read(own: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Product | None:
    """Returns the matrix product that a call of vLLM's kernel `own` would compute, from the call's
    arguments. Returns None if our kernels do not support the call.
    """
    if len(args) != 12 or any(named.get(name) for name in _QUANTISED):
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
    from workers.vllm.kernels.experts import Rows, Tile, can_multiply

    tile = Tile(*(config.get(name, other) for name, other in TILE.items()))
    if not can_multiply(x, weights, tile) or not out.is_contiguous():
        return None
    return Product(
        out, x, weights, None if share is None else share.view(-1), Rows(ids, experts, n), a_token,
        tile, lambda: own(*args, **named),
    )  # fmt: skip


def _follows(product: Product | None, opened: Opened) -> bool:
    """Returns True if `product` is the second product of the layer whose first product is `opened`,
    and our kernels support its tile.
    """
    from workers.vllm.kernels.experts import can_multiply_by_expert

    return (
        product is not None
        and product.share is not None
        and product.x.data_ptr() == opened.out.data_ptr()
        and product.tile == opened.product.tile
        and can_multiply_by_expert(opened.room, product.weights)
    )
