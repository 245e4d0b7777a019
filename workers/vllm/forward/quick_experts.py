"""Products of experts in 16 bits by kernels that open gates as they write, for one slice: chat
keeps vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poc_core import fused
from workers.vllm.forward.quickest import Compute, quickest
from workers.vllm.release import custom_ops

# Numbers of the input below which vLLM's tiles are others, and a trial is not worth its time.
LEAST = 1 << 22
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

    def by_ours(self, out: Tensor, by_expert: bool = False) -> None:
        from poc_core.fused.experts import product_  # here: Triton comes with CUDA builds

        product_(
            out, self.x, self.weights, self.share, self.rows, self.a_token, self.tile, by_expert
        )  # fmt: skip

    def of_opened(self, out: Tensor, opened: Tensor) -> None:
        """This second product, of a first one that was written by expert."""
        from poc_core.fused.experts import product_by_expert_

        assert self.share is not None
        product_by_expert_(out, opened, self.weights, self.share, self.rows, self.tile)

    @property
    def key(self) -> Any:
        """Returns the key of products that share one trial."""
        n_rows = len(self.x).bit_length()
        return n_rows, self.x.dtype, self.weights.shape, self.a_token, self.tile


class Opened(NamedTuple):
    """A layer's first product, its gates opened."""

    product: Product
    out: Tensor  # where vLLM's second product looks for it
    room: Tensor  # for the same by expert, over `out`
    by_expert: bool  # whether it lies there
    compute: Compute  # to `out`


class QuickExperts:
    """The kernels of a model, with what their trials found."""

    def __init__(self) -> None:
        self._module = custom_ops.triton_experts()
        self._is_better: dict[Any, bool] = {}  # by what a trial is of
        # By the first product: whether both take less time with it written by expert.
        self._is_better_by_expert: dict[Any, bool] = {}
        # Within a layer's experts: their first product, which waits for the gates' turn; then the
        # same, opened, where it can be written by expert; and the memory in which it lies.
        self._waiting: Product | None = None
        self._opened: Opened | None = None
        self._space: Tensor | None = None
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
        # Experts of other ranks have no weights here.
        self._space = None if named.get("expert_map") is not None else named.get("workspace13")
        try:
            found = own(experts, *args, **named)
            if self._waiting is not None or self._opened is not None:
                raise RuntimeError("vLLM's experts left out a step after their first product")
            return found
        finally:
            self._waiting = self._opened = self._space = None
            self._may_wait = False

    def _product(self, own: Callable[..., Any], *args: Any, **named: Any) -> None:
        product = self._read(own, args, named)
        opened, self._opened = self._opened, None
        if opened is not None and not _follows(product, opened):
            if opened.by_expert:
                opened.compute()
            opened = None
        if product is None:
            own(*args, **named)
            return
        if product.share is None:
            self._waiting = product
            return
        out = product.out.view(-1, product.out.shape[-1])
        if opened is not None and opened.by_expert:
            product.of_opened(out, opened.room)
            return
        way = self._way(product, product.own, lambda: product.by_ours(out), out)
        way()
        if opened is not None:
            self._try_by_expert(opened, product, way, out)

    def _try_by_expert(self, opened: Opened, product: Product, way: Compute, out: Tensor) -> None:
        """Finds out whether both products take less time with the first one written by expert;
        ends with the second one in its place."""

        def by_row() -> None:
            opened.compute()
            way()

        def by_expert() -> None:
            opened.product.by_ours(opened.room, by_expert=True)
            product.of_opened(out, opened.room)

        is_better = quickest(by_row, [by_expert], out) is not None
        self._is_better_by_expert[opened.product.key] = is_better
        if not is_better:
            by_row()

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
            and custom_ops.limit_of_gates(experts) is None
            and given.data_ptr() == product.out.data_ptr()
            and output.is_contiguous()
            and 2 * output.shape[-1] == product.weights.shape[1]
        )
        if not is_ours:
            both()
            return
        is_better = self._is_better_by_expert.get(product.key)  # None: not known yet
        room = None if is_better is False else self._room(product, output)
        if room is not None and is_better:
            product.by_ours(room, by_expert=True)
            way = both
        else:
            way = self._way(product, both, lambda: product.by_ours(output), output)
            way()
        if room is not None:
            self._opened = Opened(product, output, room, bool(is_better), way)

    def _room(self, product: Product, output: Tensor) -> Tensor | None:
        """vLLM's memory of the opened first product, with the rows by expert; None: too small."""
        from poc_core.fused.experts import rows_by_expert

        space, columns = self._space, output.shape[1]
        n = rows_by_expert(product.rows, product.tile)
        if (
            space is None
            or space.dtype != output.dtype
            or not space.is_contiguous()
            or space.data_ptr() != output.data_ptr()
            or space.numel() < n * columns
            or torch.cuda.is_current_stream_capturing()  # a trial waits for its outcome
        ):
            return None
        return space.view(-1)[: n * columns].view(n, columns)

    def _way(self, product: Product, own: Compute, ours: Compute, out: Tensor) -> Compute:
        """The better of the two."""
        if product.key not in self._is_better:
            if torch.cuda.is_current_stream_capturing():  # a trial waits for its outcome
                return own
            self._is_better[product.key] = quickest(own, [ours], out) is not None
        return ours if self._is_better[product.key] else own


def _follows(product: Product | None, opened: Opened) -> bool:
    """True if this is the second product of the first one, which its kernel takes by expert."""
    from poc_core.fused.experts import can_multiply_by_expert

    return (
        product is not None
        and product.share is not None
        and product.x.data_ptr() == opened.out.data_ptr()
        and product.tile == opened.product.tile
        and can_multiply_by_expert(opened.room, product.weights)
    )
