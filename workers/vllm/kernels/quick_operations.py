"""Fused kernels that replace vLLM's operations during a proof's slice; chat keeps vLLM's. A kernel
is used for a shape only if a trial has shown that its results are bit-identical to those of vLLM's
operation. The trial takes place in the first large call of each shape, with the call's first rows
and with numbers of all magnitudes.
"""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from poc_core.arithmetic import fused
from workers.vllm.kernels.ordered_rows import MARLIN, OrderedRows
from workers.vllm.kernels.trial import OTHER_BITS, Trial, is_right
from workers.vllm.release import custom_ops, parallel

logger = logging.getLogger(__name__)

# Smaller inputs (in numbers) use vLLM's operation: launching a kernel costs what it saves.
LEAST = 1 << 22
# Rows of a trial.
_ROWS = 512


class Call(Protocol):
    """A call of a vLLM operation that one of our kernels can compute. The class method `read`
    creates it from the operation's arguments.
    """

    @property
    def x(self) -> Tensor:
        """The input of the call, by rows."""

    @property
    def key(self) -> Any:
        """Identifies the shapes of a call. Calls with equal keys share the result of one trial,
        which compares the kernel with vLLM's operation.
        """

    def of(self, x: Tensor) -> Self:
        """Returns the same call with other input rows (n, ...), and with new tensors for the
        results.
        """

    def by_vllm(self, own: Any) -> Any:
        """Computes the call with vLLM's operation `own`. Returns the operation's return value."""

    def by_kernel(self) -> Any:
        """Computes the call with our kernel, and returns what vLLM's operation would return."""

    def bits(self, returned: Any) -> tuple[Tensor, ...]:
        """Returns the results of the call in a form that can be compared bit by bit. `returned`:
        the return value of `by_vllm` or `by_kernel`.
        """


@dataclass(frozen=True)
class _OfRows:
    """A call that writes a row of numbers, and possibly their scales, for each row of `x`."""

    x: Tensor
    out: Tensor
    scales: Tensor  # (0, 0) if there are none
    rest: tuple[Any, ...]  # the operation's arguments after these three

    def of(self, x: Tensor) -> Self:
        out = self.out.new_empty(len(x), *self.out.shape[1:])
        scales = self.scales.new_empty(len(x), self.scales.shape[1])
        if self.scales.stride(0) < self.scales.stride(1):
            scales = scales.t().contiguous().t()
        return type(self)(x, out, scales, self.rest)

    @property
    def key(self) -> Any:
        rest = tuple(len(one) if isinstance(one, Tensor) else one for one in self.rest)
        return self.x.shape[1:], self.x.dtype, self.scales.stride(0) == 1, rest

    def bits(self, _returned: Any) -> tuple[Tensor, ...]:
        return self.out.view(torch.uint8), self.scales

    @property
    def _is_of_8_bits(self) -> bool:
        return (
            self.x.element_size() == 2
            and self.out.dtype is torch.float8_e4m3fn
            and _is_flat(self.x)
            and _is_flat(self.out)
        )


class Silu(_OfRows):
    """A call that applies a gated activation (silu) and quantises the result to 8 bits."""

    name = "_C::silu_and_mul_per_block_quant"

    @classmethod
    def read(cls, out: Tensor, x: Tensor, scales: Tensor, group: int, *rest: Any) -> Self | None:
        call = cls(x, out, scales, (group, *rest))
        is_ours = call.rest == (128, None, False) and call._is_of_8_bits and _is_flat(scales)
        return call if is_ours else None

    def by_vllm(self, own: Any) -> Any:
        return own(self.out, self.x, self.scales, *self.rest)

    def by_kernel(self) -> None:
        # imported here: Triton comes with CUDA builds
        from workers.vllm.kernels.quantise import silu_and_quantise_

        silu_and_quantise_(self.out, self.scales, self.x)


class Quantise(_OfRows):
    """A call that quantises groups of 128 numbers to 8 bits."""

    name = "_C::per_token_group_fp8_quant"

    @classmethod
    def read(cls, x: Tensor, out: Tensor, scales: Tensor, group: int, *rest: Any) -> Self | None:
        call = cls(x, out, scales, (group, *rest))
        # Smallest peak, smallest and largest number, whether scales are powers of two, and layouts.
        is_ours = (
            group == 128
            and len(rest) >= 4
            and rest[1:3] == (-448.0, 448.0)
            and scales.dtype == torch.float32
            and scales.dim() == x.dim() == 2
            and call._is_of_8_bits
        )
        return call if is_ours else None

    def by_vllm(self, own: Any) -> Any:
        return own(self.x, self.out, self.scales, *self.rest)

    def by_kernel(self) -> None:
        from workers.vllm.kernels.quantise import quantise_

        quantise_(self.out, self.scales, self.x, self.rest[1], powers=bool(self.rest[4]))


class HeadNorm(_OfRows):
    """A call that applies an RMS norm to each attention head."""

    name = "_C::rms_norm"

    @classmethod
    def read(cls, out: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> Self | None:
        if weight is None or weight.dim() != 1 or x.dim() != 3 or x.element_size() != 2:
            return None
        from workers.vllm.kernels.norms import can_norm_heads

        return cls(x, out, x.new_empty(0, 0), (weight, eps)) if can_norm_heads(x) else None

    def by_vllm(self, own: Any) -> Any:
        return own(self.out, self.x, *self.rest)

    def by_kernel(self) -> None:
        from workers.vllm.kernels.norms import norm_heads_

        norm_heads_(self.out, self.x, *self.rest)


@dataclass(frozen=True)
class Rotation:
    """A call that applies the rotary embedding to queries and keys in place."""

    positions: Tensor
    query: Tensor
    keys: Tensor
    head: int
    angles: Tensor

    name = "_C::rotary_embedding"

    @classmethod
    def read(
        cls,
        positions: Tensor,
        query: Tensor,
        keys: Tensor | None,
        head: int,
        angles: Tensor,
        in_halves: bool,
    ) -> Self | None:
        if keys is None or not in_halves or positions.shape != query.shape[:1]:
            return None
        from workers.vllm.kernels.rotary import can_rotate

        is_ours = can_rotate(query, keys, head, angles)
        return cls(positions, query, keys, head, angles) if is_ours else None

    @property
    def x(self) -> Tensor:
        """The first rows of the input: each row's queries, followed by its keys."""
        return torch.cat([self.query[:_ROWS], self.keys[:_ROWS]], -1)

    def of(self, x: Tensor) -> Self:
        query, keys = x.clone().split([self.query.shape[1], self.keys.shape[1]], -1)
        positions = _all_positions(self.positions, len(x), self.angles)
        return replace(self, positions=positions, query=query, keys=keys)

    @property
    def key(self) -> Any:
        shapes = self.query.shape[1], self.keys.shape[1], self.angles.shape
        return *shapes, self.head, self.query.dtype, self.positions.dtype

    def by_vllm(self, own: Any) -> Any:
        return own(self.positions, self.query, self.keys, self.head, self.angles, True)

    def by_kernel(self) -> None:
        from workers.vllm.kernels.rotary import rotate_

        rotate_(self.query, self.keys, self.positions, self.head, self.angles)

    def bits(self, _returned: Any) -> tuple[Tensor, ...]:
        return self.query.view(torch.int16), self.keys.view(torch.int16)


@dataclass(frozen=True)
class Writing:
    """A call that writes keys and values (tokens, heads, head size) to KV caches (blocks, block
    size, heads, head size).
    """

    keys: Tensor
    values: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    format: str
    key_scale: Tensor
    value_scale: Tensor

    name = "_C_cache_ops::reshape_and_cache_flash"

    @classmethod
    def read(cls, *args: Any) -> Self | None:
        call = cls(*args)
        if call.format not in ("auto", "fp8", "fp8_e4m3") or call.keys.numel() < LEAST // 4:
            return None
        from workers.vllm.kernels.caches import can_write

        of_all = call.key_scale.numel() == call.value_scale.numel() == 1
        is_ours = of_all and can_write(call.keys, call.values, call.key_cache, call.value_cache)
        same = call.key_cache.dtype == call.keys.dtype
        return call if is_ours and same == (call.format == "auto") else None

    @property
    def x(self) -> Tensor:
        """The first rows of the input: each row's keys, followed by its values."""
        return torch.cat([self.keys[:_ROWS], self.values[:_ROWS]], -1)

    def of(self, x: Tensor) -> Self:
        n, *page = len(x) // self.key_cache.shape[1] + 2, *self.key_cache.shape[1:]
        slots = torch.arange(len(x), device=x.device, dtype=self.slots.dtype).flip(0)
        slots[::7] = -1  # a token without a slot
        keys, values = (one.contiguous() for one in x.chunk(2, -1))
        caches = self.key_cache.new_zeros(n, *page), self.value_cache.new_zeros(n, *page)
        return type(self)(
            keys, values, *caches, slots, self.format, self.key_scale, self.value_scale
        )

    @property
    def key(self) -> Any:
        cache = self.key_cache
        return self.keys.shape[1:], self.keys.dtype, cache.dtype, cache.shape[1], self.format

    def by_vllm(self, own: Any) -> Any:
        return own(*vars(self).values())

    def by_kernel(self) -> None:
        from workers.vllm.kernels.caches import write_

        write_(*(one for name, one in vars(self).items() if name != "format"))

    def bits(self, _returned: Any) -> tuple[Tensor, ...]:
        return self.key_cache.view(torch.uint8), self.value_cache.view(torch.uint8)


@dataclass(frozen=True)
class Unrotation:
    """A call that reverses the rotary embedding in DeepSeek-V4's attention outputs (tokens, heads,
    head size), and quantises the result to 8 bits. It returns numbers (groups, tokens, columns) and
    scales.
    """

    x: Tensor
    positions: Tensor
    angles: Tensor
    heads: int  # per group
    rest: tuple[Any, ...]  # arguments of the operation: the rotated part of a head, and of a scale
    # Tokens rounded up to a multiple of four, tokens, groups, a group's columns and scales.
    sizes: tuple[int, ...]

    name = "vllm::fused_inv_rope_fp8_quant_kernel"

    @classmethod
    def read(
        cls, x: Tensor, positions: Tensor, angles: Tensor, heads: int, *rest: Any
    ) -> Self | None:
        if x.dim() != 3 or len(rest) < 11:
            return None
        of_numbers, sizes, more = rest[:6], rest[6:11], rest[11:]
        n, n_heads, head = x.shape
        turned = angles.shape[-1]
        # Columns before the rotated ones: of a head or, in 0.25, of its last group.
        is_known = of_numbers[2] in {head - turned, (head - turned) % 128}
        # Columns of a scale, scales of a head, the columns above, half of the rotated columns,
        # whether scales are packed, the largest number.
        is_known &= of_numbers == (128, head // 128, of_numbers[2], turned // 2, False, 448.0)
        is_known &= sizes == (
            *(-(-n // 4) * 4, n, n_heads // heads, heads * head, heads * head // 128),
        )
        if not is_known or more not in {(), (True,)}:  # since 0.30: whether to quantise
            return None
        from workers.vllm.kernels.inverse_rotary import can_unrotate

        call = cls(x, positions, angles, heads, of_numbers, (*sizes, *more))
        return call if can_unrotate(x, positions, angles, heads) else None

    def of(self, x: Tensor) -> Self:
        n = len(x)
        positions = _all_positions(self.positions, n, self.angles)
        sizes = (-(-n // 4) * 4, n, *self.sizes[2:])
        return replace(self, x=x, positions=positions, sizes=sizes)

    @property
    def key(self) -> Any:
        return self.x.shape[1:], self.x.dtype, self.angles.shape, self.heads, self.rest

    def by_vllm(self, own: Any) -> Any:
        return own(self.x, self.positions, self.angles, self.heads, *self.rest, *self.sizes)

    def by_kernel(self) -> tuple[Tensor, Tensor]:
        from workers.vllm.kernels.inverse_rotary import unrotate_and_quantise_

        padded, n, groups, columns, n_scales = self.sizes[:5]
        out = self.x.new_empty(groups, n, columns, dtype=torch.float8_e4m3fn)
        scales = self.x.new_empty(groups * n_scales * padded, dtype=torch.float32).as_strided(
            (groups, n, n_scales), (n_scales * padded, 1, padded)
        )
        unrotate_and_quantise_(out, scales, self.x, self.positions, self.angles)
        return out, scales

    def bits(self, returned: Any) -> tuple[Tensor, ...]:
        out, scales = returned
        return out.view(torch.uint8), scales


def _is_flat(x: Tensor) -> bool:
    return x.dim() == 2 and x.is_contiguous()


def _all_positions(like: Tensor, n: int, angles: Tensor) -> Tensor:
    """Returns positions for the n tokens of a trial, spread over all positions for which there are
    rotary angles. `like`: a tensor with the same dtype and device.
    """
    return torch.arange(n, device=like.device, dtype=like.dtype) * 97 % len(angles)


OPERATIONS: dict[str, Any] = {
    one.name: one for one in (Silu, Quantise, HeadNorm, Rotation, Writing, Unrotation)
}


class StandIn:
    """A replacement of a vLLM operation. It uses our kernel for shapes for which a trial succeeded,
    and vLLM's operation for all others.
    """

    def __init__(self, name: str, own: Any) -> None:
        self._name, self._own = name, own
        self.is_right = Trial[bool]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        is_for_kernels = not named and any(
            isinstance(one, Tensor) and one.numel() >= LEAST and fused.is_on(one.device)
            for one in args
        )
        call = self._read(*args) if is_for_kernels else None
        if call is None or not self.is_right.of(call.key, partial(self._try, call)):
            return self._own(*args, **named)
        return call.by_kernel()

    def _read(self, *args: Any) -> Call | None:
        try:
            call: Call | None = OPERATIONS[self._name].read(*args)
        except TypeError:  # the arguments of another release
            return None
        return call

    def _try(self, call: Call) -> bool:
        """Returns True if the kernel's results are bit-identical to those of vLLM's operation."""

        def why_not() -> str:
            of_all_sizes = all_sizes(_ROWS, call.x[0].numel(), call.x)
            for x in (call.x[:_ROWS], of_all_sizes.view(_ROWS, *call.x.shape[1:])):
                theirs, ours = call.of(x), call.of(x)
                expected = theirs.bits(theirs.by_vllm(self._own))
                if not all(map(torch.equal, expected, ours.bits(ours.by_kernel()))):
                    return OTHER_BITS
            return ""

        return is_right(f"the fused kernel for {self._name}", why_not)


def all_sizes(rows: int, columns: int, like: Tensor) -> Tensor:
    """Returns random numbers (rows, columns) for a trial. Their magnitude grows from row to row, up
    to 2^60 in bfloat16. Some are zeros of both signs. `like`: a tensor with the same dtype and
    device.
    """
    generator = torch.Generator(like.device).manual_seed(rows)
    normal = torch.randn(rows, columns, generator=generator, device=like.device)
    exponents = torch.linspace(-133, 60 if like.dtype is torch.bfloat16 else 12, rows)
    found = (normal.double() * exponents.double().exp2().to(like.device)[:, None]).to(like.dtype)
    found[:, :: columns // 16] = 0.0
    found[:, 1 :: columns // 16] = -0.0
    found[rows // 2] = 0.0
    return found


# vLLM's operation for a router with weights in float32.
ROUTER = "vllm::fp32_router_gemm_dispatch"


class SharedRouter:
    """A replacement of an MoE router's matrix product: each tensor-parallel rank computes a part of
    the rows. Used only if all ranks have the same input, and if the number of rows does not affect
    the bits of a row's result.
    """

    def __init__(self, own: Any) -> None:
        self.replicated = False  # whether the ranks have the same rows: determined after the start
        self._own = own
        self._is_right = Trial[bool]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        """Returns the router's logits for the rows of `x`. `rest`: in later releases, whether vLLM
        can use a kernel for Blackwell.
        """
        rank, n_ranks = parallel.tensor_ranks()

        def by_shares() -> Tensor:
            rows = len(x) // n_ranks
            return parallel.of_all_tensor_ranks(self._own(x[rank * rows :][:rows], weight, *rest))

        def find() -> bool:
            same = torch.equal(by_shares(), self._own(x, weight, *rest))
            # all ranks must agree, or some would wait for the others
            if not (found := parallel.do_all_tensor_ranks(same)):
                logger.warning("routing %d rows by shares %s", len(x), OTHER_BITS)
            return found

        may_share = (
            self.replicated
            and n_ranks > 1
            and len(x) % n_ranks == 0
            and x.numel() >= LEAST
            and fused.is_on(x.device)
        )
        if may_share and self._is_right.of((x.shape, x.dtype, weight.shape), find):
            return by_shares()
        return cast(Tensor, self._own(x, weight, *rest))


class QuickOperations:
    """The kernels that replace vLLM's operations in one model. Each replacement stores for which
    shapes a trial found its kernel correct.
    """

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
            except (ValueError, AttributeError) as error:  # the arguments of another release
                logger.warning("Marlin's experts may give other bits each time: %s", error)

    def settle(self, replicated: bool) -> None:
        """Sets whether the outputs of layers are equal on all tensor-parallel ranks. If they are,
        the ranks can divide the rows of MoE routers among themselves.
        """
        if ROUTER in self._stand_ins:
            self._stand_ins[ROUTER].replicated = replicated

    def bound(self) -> AbstractContextManager[None]:
        """Makes vLLM use the kernels inside the context."""
        return custom_ops.in_place_of_operations(self._stand_ins)
