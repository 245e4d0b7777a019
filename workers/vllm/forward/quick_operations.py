"""Fused kernels in the place of vLLM's operations, for one slice: chat keeps vLLM's own.

A kernel is used where it was seen to give the bits of vLLM's: the first large call of each shape
runs both, on the first rows of what is to be computed and on numbers of all sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from poc_core import fused
from workers.vllm.forward.ordered_rows import MARLIN, OrderedRows
from workers.vllm.release import custom_ops, parallel

logger = logging.getLogger(__name__)

# Numbers of the input below which a kernel's launch by Python costs what the kernel spares.
LEAST = 1 << 22
# Rows of a trial.
_ROWS = 512


class Call(NamedTuple):
    """A call of an operation that a kernel can answer: what is computed, and where it goes."""

    x: Tensor
    out: Tensor
    scales: Tensor  # none of them: (0, 0)
    # Of the operation: arguments after these three.
    rest: tuple[Any, ...]

    def of(self, x: Tensor) -> Call:
        """The same call for other rows (n, ...), with results of its own."""
        out = self.out.new_empty(len(x), *self.out.shape[1:])
        scales = self.scales.new_empty(len(x), self.scales.shape[1])
        if self.scales.stride(0) < self.scales.stride(1):
            scales = scales.t().contiguous().t()
        return Call(x, out, scales, self.rest)

    @property
    def key(self) -> Any:
        """Returns the key of calls that share one trial."""
        rest = tuple(len(one) if isinstance(one, Tensor) else one for one in self.rest)
        return self.x.shape[1:], self.x.dtype, self.scales.stride(0) == 1, rest

    def has_results_of(self, other: Call) -> bool:
        """True if both have the same bits."""
        return _are_same(self, other)


def _are_same(one: Call | Unrotated, other: Call | Unrotated) -> bool:
    """True if both have the same numbers of 8 bits and the same scales."""
    bits, others = (x.out.view(torch.uint8) for x in (one, other))
    return torch.equal(bits, others) and torch.equal(one.scales, other.scales)


class Rotation(NamedTuple):
    """A call of the rotary embedding, which turns queries and keys in their place."""

    query: Tensor
    keys: Tensor
    positions: Tensor
    head: int
    angles: Tensor

    @property
    def x(self) -> Tensor:
        """The first rows, keys beside queries."""
        return torch.cat([self.query[:_ROWS], self.keys[:_ROWS]], -1)

    def of(self, x: Tensor) -> Rotation:
        """The same call for other rows (n, ...), of all positions."""
        query, keys = x.clone().split([self.query.shape[1], self.keys.shape[1]], -1)
        positions = torch.arange(len(x), device=x.device, dtype=self.positions.dtype)
        positions = positions * 97 % len(self.angles)
        return Rotation(query, keys, positions, self.head, self.angles)

    @property
    def key(self) -> Any:
        """Returns the key of calls that share one trial."""
        shapes = self.query.shape[1], self.keys.shape[1], self.angles.shape
        return *shapes, self.head, self.query.dtype, self.positions.dtype

    def has_results_of(self, other: Rotation) -> bool:
        """True if both have the same bits."""
        both = zip((self.query, self.keys), (other.query, other.keys), strict=True)
        return all(torch.equal(*(one.view(torch.int16) for one in pair)) for pair in both)


class Writing(NamedTuple):
    """A call that writes keys and values (tokens, heads, head) into caches (pages, page, heads,
    head)."""

    keys: Tensor
    values: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    format: str
    key_scale: Tensor
    value_scale: Tensor

    @property
    def x(self) -> Tensor:
        """The first rows, values beside keys."""
        return torch.cat([self.keys[:_ROWS], self.values[:_ROWS]], -1)

    def of(self, x: Tensor) -> Writing:
        """The same call for other rows (n, heads, keys beside values), with caches of its own."""
        n, *page = len(x) // self.key_cache.shape[1] + 2, *self.key_cache.shape[1:]
        slots = torch.arange(len(x), device=x.device, dtype=self.slots.dtype).flip(0)
        slots[::7] = -1  # a token without a place
        keys, values = (one.contiguous() for one in x.chunk(2, -1))
        return self._replace(
            keys=keys,
            values=values,
            key_cache=self.key_cache.new_zeros(n, *page),
            value_cache=self.value_cache.new_zeros(n, *page),
            slots=slots,
        )

    @property
    def key(self) -> Any:
        """Returns the key of calls that share one trial."""
        cache = self.key_cache
        return self.keys.shape[1:], self.keys.dtype, cache.dtype, cache.shape[1], self.format

    def has_results_of(self, other: Writing) -> bool:
        """True if both have the same bits."""
        caches = ((self.key_cache, other.key_cache), (self.value_cache, other.value_cache))
        return all(torch.equal(*(one.view(torch.uint8) for one in pair)) for pair in caches)


class Unrotated(NamedTuple):
    """Outputs of attention, turned back: (groups, tokens, columns) and scales."""

    out: Tensor
    scales: Tensor

    def has_results_of(self, other: Unrotated) -> bool:
        """True if both have the same bits."""
        return _are_same(self, other)


class Unrotation(NamedTuple):
    """A call that turns outputs of attention (tokens, heads, head) back and quantises them."""

    x: Tensor
    positions: Tensor
    angles: Tensor
    heads: int  # of a group
    rest: tuple[Any, ...]  # of the operation: what of a head is turned, and of a scale
    # Tokens up to a multiple of four, tokens, groups, a group's columns and scales.
    sizes: tuple[int, ...]

    def of(self, x: Tensor) -> Unrotation:
        """The same call for other rows (n, heads, head), of all positions."""
        n = len(x)
        positions = torch.arange(n, device=x.device, dtype=self.positions.dtype)
        positions = positions * 97 % len(self.angles)
        return self._replace(x=x, positions=positions, sizes=(-(-n // 4) * 4, n, *self.sizes[2:]))

    @property
    def key(self) -> Any:
        """Returns the key of calls that share one trial."""
        return self.x.shape[1:], self.x.dtype, self.angles.shape, self.heads, self.rest

    @property
    def args(self) -> tuple[Any, ...]:
        """The operation's arguments."""
        return *self[:4], *self.rest, *self.sizes


class Operation(NamedTuple):
    """An operation of vLLM's and the kernel in its place."""

    # Its arguments, as Call, Rotation, Writing or Unrotation; None: the kernel does not take them.
    read: Callable[..., Any]
    # Both write into what they are given, or return their results.
    own: Callable[[Any, Any], Any]  # calls the operation
    kernel: Callable[[Any], Any]


def _read_silu(out: Tensor, x: Tensor, scales: Tensor, group: int, *rest: Any) -> Call | None:
    is_ours = group == 128 and rest == (None, False) and _is_ours(x, out) and _is_flat(scales)
    return Call(x, out, scales, (group, *rest)) if is_ours else None


def _silu_kernel(call: Call) -> None:
    from poc_core.fused.quantise import silu_and_quantise_  # here: Triton comes with CUDA builds

    silu_and_quantise_(call.out, call.scales, call.x)


def _read_quantise(x: Tensor, out: Tensor, scales: Tensor, group: int, *rest: Any) -> Call | None:
    # Smallest peak, smallest and largest number, whether scales are powers of two, and layouts.
    is_ours = (
        group == 128
        and len(rest) >= 4
        and rest[1:3] == (-448.0, 448.0)
        and scales.dtype == torch.float32
        and scales.dim() == x.dim() == 2
        and _is_ours(x, out)
    )
    return Call(x, out, scales, (group, *rest)) if is_ours else None


def _quantise_kernel(call: Call) -> None:
    from poc_core.fused.quantise import quantise_

    quantise_(call.out, call.scales, call.x, call.rest[1], powers=bool(call.rest[4]))


def _read_norm(out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Call | None:
    if weight is None or weight.dim() != 1 or x.dim() != 3 or x.element_size() != 2:
        return None
    from poc_core.fused.norms import can_norm_heads

    return Call(x, out, x.new_empty(0, 0), (weight, eps)) if can_norm_heads(x) else None


def _norm_kernel(call: Call) -> None:
    from poc_core.fused.norms import norm_heads_

    norm_heads_(call.out, call.x, *call.rest)


def _read_rotation(
    positions: Tensor,
    query: Tensor,
    keys: Tensor | None,
    head: int,
    angles: Tensor,
    in_halves: bool,
) -> Rotation | None:
    if keys is None or not in_halves or positions.shape != query.shape[:1]:
        return None
    from poc_core.fused.rotary import can_rotate

    is_ours = can_rotate(query, keys, head, angles)
    return Rotation(query, keys, positions, head, angles) if is_ours else None


def _rotation_kernel(call: Rotation) -> None:
    from poc_core.fused.rotary import rotate_

    rotate_(call.query, call.keys, call.positions, call.head, call.angles)


def _read_writing(*args: Any) -> Writing | None:
    call = Writing(*args)
    if call.format not in ("auto", "fp8", "fp8_e4m3") or call.keys.numel() < LEAST // 4:
        return None
    from poc_core.fused.caches import can_write

    of_all = call.key_scale.numel() == call.value_scale.numel() == 1
    is_ours = of_all and can_write(call.keys, call.values, call.key_cache, call.value_cache)
    same = call.key_cache.dtype == call.keys.dtype
    return call if is_ours and same == (call.format == "auto") else None


def _writing_kernel(call: Writing) -> None:
    from poc_core.fused.caches import write_

    write_(*call[:5], *call[6:])


def _read_unrotation(
    x: Tensor, positions: Tensor, angles: Tensor, heads: int, *rest: Any
) -> Unrotation | None:
    if x.dim() != 3 or len(rest) < 11:
        return None
    of_numbers, sizes, more = rest[:6], rest[6:11], rest[11:]
    n, n_heads, head = x.shape
    turned = angles.shape[-1]
    # Columns before those that are turned: of a head, or, in 0.25, of its last group.
    is_known = of_numbers[2] in {head - turned, (head - turned) % 128}
    # Columns of a scale, scales of a head, those columns, half of what is turned, whether scales
    # are packed, the largest number.
    is_known &= of_numbers == (128, head // 128, of_numbers[2], turned // 2, False, 448.0)
    is_known &= sizes == (-(-n // 4) * 4, n, n_heads // heads, heads * head, heads * head // 128)
    if not is_known or more not in {(), (True,)}:  # since 0.30: whether it is to quantise
        return None
    from poc_core.fused.inverse_rotary import can_unrotate

    call = Unrotation(x, positions, angles, heads, of_numbers, (*sizes, *more))
    return call if can_unrotate(x, positions, angles, heads) else None


def _unrotation_kernel(call: Unrotation) -> Unrotated:
    from poc_core.fused.inverse_rotary import unrotate_and_quantise_

    padded, n, groups, columns, n_scales = call.sizes[:5]
    out = call.x.new_empty(groups, n, columns, dtype=torch.float8_e4m3fn)
    scales = call.x.new_empty(groups * n_scales * padded, dtype=torch.float32).as_strided(
        (groups, n, n_scales), (n_scales * padded, 1, padded)
    )
    unrotate_and_quantise_(out, scales, call.x, call.positions, call.angles)
    return Unrotated(out, scales)


def _is_ours(x: Tensor, out: Tensor) -> bool:
    return (
        x.element_size() == 2 and out.dtype is torch.float8_e4m3fn and _is_flat(x) and _is_flat(out)
    )


def _is_flat(x: Tensor) -> bool:
    return x.dim() == 2 and x.is_contiguous()


CACHE = "_C_cache_ops::reshape_and_cache_flash"
UNROTATE = "vllm::fused_inv_rope_fp8_quant_kernel"  # DeepSeek-V4's
OPERATIONS = {
    "_C::silu_and_mul_per_block_quant": Operation(
        _read_silu, lambda own, call: own(call.out, call.x, call.scales, *call.rest), _silu_kernel
    ),
    "_C::per_token_group_fp8_quant": Operation(
        _read_quantise,
        lambda own, call: own(call.x, call.out, call.scales, *call.rest),
        _quantise_kernel,
    ),
    "_C::rms_norm": Operation(
        _read_norm, lambda own, call: own(call.out, call.x, *call.rest), _norm_kernel
    ),
    "_C::rotary_embedding": Operation(
        _read_rotation,
        lambda own, call: own(call.positions, call.query, call.keys, call.head, call.angles, True),
        _rotation_kernel,
    ),
    CACHE: Operation(_read_writing, lambda own, call: own(*call), _writing_kernel),
    UNROTATE: Operation(
        _read_unrotation, lambda own, call: Unrotated(*own(*call.args)), _unrotation_kernel
    ),
}


class StandIn:
    """Replaces an operation of vLLM."""

    def __init__(self, name: str, own: Any) -> None:
        self._name, self._own, self._of = name, own, OPERATIONS[name]
        self.is_right: dict[Any, bool] = {}  # by what a trial is of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        is_for_kernels = not named and any(
            isinstance(one, Tensor) and one.numel() >= LEAST and fused.is_on(one.device)
            for one in args
        )
        call = self._read(*args) if is_for_kernels else None
        if call is None:
            return self._own(*args, **named)
        key = call.key
        if key not in self.is_right:
            if torch.cuda.is_current_stream_capturing():  # a trial waits for its outcome
                return self._own(*args)
            self.is_right[key] = self._try(call)
        if not self.is_right[key]:
            return self._own(*args)
        return self._of.kernel(call)

    def _read(self, *args: Any) -> Any:
        try:
            return self._of.read(*args)
        except TypeError:  # the arguments of another release
            return None

    def _try(self, call: Any) -> bool:
        """True if the kernel's bits are the operation's; says so where not."""
        try:
            of_all_sizes = all_sizes(_ROWS, call.x[0].numel(), call.x)
            for x in (call.x[:_ROWS], of_all_sizes.view(_ROWS, *call.x.shape[1:])):
                theirs, ours = call.of(x), call.of(x)
                theirs = self._of.own(self._own, theirs) or theirs
                ours = self._of.kernel(ours) or ours
                if not theirs.has_results_of(ours):
                    logger.warning("the fused kernel for %s gives other bits: not used", self._name)
                    return False
        except Exception as error:
            logger.warning("the fused kernel for %s cannot be used: %s", self._name, error)
            return False
        return True


def all_sizes(rows: int, columns: int, like: Tensor) -> Tensor:
    """Numbers whose sizes differ by row, from the smallest to 2^60, zeros of both signs among them:
    (rows, columns)."""
    generator = torch.Generator(like.device).manual_seed(rows)
    normal = torch.randn(rows, columns, generator=generator, device=like.device)
    exponents = torch.linspace(-133, 60 if like.dtype is torch.bfloat16 else 12, rows)
    found = (normal.double() * exponents.double().exp2().to(like.device)[:, None]).to(like.dtype)
    found[:, :: columns // 16] = 0.0
    found[:, 1 :: columns // 16] = -0.0
    found[rows // 2] = 0.0
    return found


# vLLM's, of a layer of experts whose router has weights in float32.
ROUTER = "vllm::fp32_router_gemm_dispatch"


class SharedRouter:
    """Routes a share of the rows on each tensor-parallel rank, where the ranks have the same rows
    and a row's bits do not depend on how many there are.
    """

    def __init__(self, own: Any) -> None:
        self.replicated = False  # whether the ranks have the same rows: known after the start
        self._own = own
        self._is_right: dict[Any, bool] = {}  # by shape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        """`rest`: of later releases, whether Blackwell's kernel may be taken."""
        rank, n_ranks = parallel.tensor_ranks()
        key = (x.shape, x.dtype, weight.shape)
        is_right = self._is_right.get(key)
        if (
            is_right is False
            or not self.replicated
            or n_ranks == 1
            or len(x) % n_ranks
            or x.numel() < LEAST
            or not fused.is_on(x.device)
            or (is_right is None and torch.cuda.is_current_stream_capturing())
        ):
            return cast(Tensor, self._own(x, weight, *rest))
        rows = len(x) // n_ranks
        logits = parallel.of_all_tensor_ranks(self._own(x[rank * rows :][:rows], weight, *rest))
        if is_right is None:  # all ranks say the same: else some would wait for the others
            own = self._own(x, weight, *rest)
            self._is_right[key] = parallel.do_all_tensor_ranks(torch.equal(own, logits))
            if not self._is_right[key]:
                logger.warning("routing %d rows by shares gives other bits: not done", len(x))
                return cast(Tensor, own)
        return logits


class QuickOperations:
    """The kernels of a model, with what their trials found."""

    def __init__(self) -> None:
        own = {name: custom_ops.operation(name) for name in OPERATIONS}
        self._stand_ins: dict[str, Any] = {
            name: StandIn(name, one) for name, one in own.items() if one
        }
        if router := custom_ops.operation(ROUTER):
            self._stand_ins[ROUTER] = SharedRouter(router)
        if products := custom_ops.operation(MARLIN):
            try:
                self._stand_ins[MARLIN] = OrderedRows(products, custom_ops.argument_names(products))
            except (ValueError, AttributeError) as error:  # another release's arguments
                logger.warning("Marlin's experts may give other bits each time: %s", error)

    def settle(self, replicated: bool) -> None:
        """Whether layers' outputs are the same on all tensor-parallel ranks."""
        if ROUTER in self._stand_ins:
            self._stand_ins[ROUTER].replicated = replicated

    def bound(self) -> AbstractContextManager[None]:
        """Within, vLLM's model calls the kernels."""
        return custom_ops.in_place_of_operations(self._stand_ins)
