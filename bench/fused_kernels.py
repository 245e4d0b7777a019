"""The speed of the fused kernels between matrix products, compared with vLLM's own operations.

    python -m bench.fused_kernels --dimensions minimax-m2.7 --layers 8  # on a GPU host

First each kernel is compared with vLLM's operation, bit for bit, in the shapes of MiniMax-M2.7 on
one GPU and on one of two; then complete micro-batches of an engine with PROOFLINE_FUSED=off and
without.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.engine import takes_engine
from bench.harness.report import console, measures, run, say, table
from lab.local_engine import clean_stdout, local_engine
from lab.measure.artifact_distance import artifacts
from lab.measure.speed import spec_of, speed
from lab.measure.time_parts import time_parts
from poc_core.fused import SWITCH
from workers.engines.options import EngineOptions

TOKENS, HIDDEN, EXPERTS_PER_TOKEN, INTERMEDIATE = 32 * 1024, 3072, 8, 768
QKV = (6144, 1024, 1024)  # of one GPU: all heads
HEADS, HEAD = 32, 128  # of Qwen3-30B-A3B and Qwen3-8B
EXPERTS, EXPERTS_HIDDEN = 128, 2048  # of Qwen3-30B-A3B, whose experts have INTERMEDIATE columns
ROTARY, CACHE = "_C::rotary_embedding", "_C_cache_ops::reshape_and_cache_flash"
MINIMAX_EXPERTS = 256
GROUP, LIMITS = 128, (-448.0, 448.0)
BYTES_PER_S = 4.8e12  # of an H200's memory, as its maker says
TIMES = 20
BATCH = 32
LONGEST = 16  # kernels of a micro-batch that are printed


@takes_engine(dimensions="minimax-m2.7")
@measures
def main(
    *,
    engine_options: EngineOptions,
    seq_len: Annotated[int, typer.Option(min=1, help="Positions of a nonce.")] = 1024,
    seconds: Annotated[float, typer.Option(min=1, help="How long each engine computes.")] = 6.0,
    kernels: Annotated[bool, typer.Option(help="Each kernel alone.")] = True,
    engines: Annotated[bool, typer.Option(help="Whole micro-batches.")] = True,
) -> bool:
    """Compares kernels with vLLM's operations, and micro-batches with and without the kernels.

    Exits with 1 if bits differ, or if a kernel is slower than the operation that it replaces.
    """
    say(machine.describe())
    fine = [compare_kernels()] if kernels else []
    fine += [compare_engines(engine_options, seq_len, seconds)] if engines else []
    return all(fine)


def compare_kernels() -> bool:
    """Prints a row per kernel and shape; returns whether bits are the same and none is slower."""
    from workers.vllm.forward.quick_operations import StandIn
    from workers.vllm.release import custom_ops  # imports vLLM, which registers its operations

    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    title = f"{TOKENS:,} tokens, bfloat16, ms"
    rows = table(title, "operation", "shape", "vLLM's own", "kernel", "MB", "at 4.8 TB/s", "bits")
    fine = True
    for name, shape, by_column in (
        ("_C::silu_and_mul_per_block_quant", (TOKENS * EXPERTS_PER_TOKEN, INTERMEDIATE), False),
        ("_C::silu_and_mul_per_block_quant", (TOKENS * EXPERTS_PER_TOKEN, 2 * INTERMEDIATE), False),
        ("_C::per_token_group_fp8_quant", (TOKENS, HIDDEN), False),
        ("_C::per_token_group_fp8_quant", (TOKENS, HIDDEN), True),
        ("_C::rms_norm", (TOKENS, HEADS * HEAD), False),
        (ROTARY, (TOKENS, HEADS * HEAD), False),
        (CACHE, (TOKENS, HEADS * HEAD // 8), False),
    ):
        own: Any = custom_ops.operation(name)
        ours = StandIn(name, own)
        theirs_call, our_call = (arguments(name, shape, by_column) for _ in range(2))
        own(*theirs_call)
        ours(*our_call)
        same = all(map(_same, theirs_call, our_call)) and all(ours.is_right.found.values())
        before = milliseconds(partial(own, *theirs_call))
        after = milliseconds(partial(ours, *our_call))
        moved = sum(x.numel() * x.element_size() for x in our_call if isinstance(x, torch.Tensor))
        moved *= 2 if name == ROTARY else 1  # in place
        what = name + (", by column" if by_column else "")
        fine &= add_row(rows, what, f"{shape[0]:,} x {shape[1]:,}", before, after, moved, same)
    fine &= norms_rows(rows)
    fine &= experts_rows(rows)
    for middle in (INTERMEDIATE, 2 * INTERMEDIATE):
        fine &= block_experts_row(rows, middle)
    console.print(rows)
    return fine


def add_row(
    rows: Table, name: str, shape: str, before_ms: float, after_ms: float, moved: int, same: bool
) -> bool:
    """Adds a row; returns whether the bits are the same and the kernel is not slower.

    `moved`: the bytes that a perfect kernel reads and writes.
    """
    rows.add_row(
        name,
        shape,
        f"{before_ms:.3f}",
        f"{after_ms:.3f}",
        f"{moved / 1e6:,.0f}",
        f"{1000 * moved / BYTES_PER_S:.3f}",
        "same" if same else "[bold red]other[/]",
    )
    return same and after_ms <= before_ms


def norms_rows(rows: Table) -> bool:
    """Adds MiniMax's norms of queries and keys; returns what `add_row` does."""
    from workers.vllm.forward.quick_norms import in_one_pass
    from workers.vllm.release import custom_ops

    norms: Any = custom_ops.query_and_key_norms()
    qkv = torch.randn(TOKENS, sum(QKV), device="cuda").bfloat16()
    q, k, _ = qkv.split(QKV, dim=-1)
    weights = [torch.ones(one, dtype=torch.bfloat16, device="cuda") for one in QKV[:2]]
    args = (*(SimpleNamespace(weight=one, variance_epsilon=1e-6) for one in weights), q, k)
    theirs, before = norms.forward_qk(*args), milliseconds(partial(norms.forward_qk, *args))
    moved, shape = 4 * (q.numel() + k.numel()), f"{TOKENS:,} x {QKV[0]:,} and {QKV[1]:,}"
    same = all(map(torch.equal, theirs, in_one_pass(*args)))
    after = milliseconds(partial(in_one_pass, *args))
    return add_row(rows, "norms of queries and keys", shape, before, after, moved, same)


def experts_rows(table: Table) -> bool:
    """Adds the products of bfloat16 experts with vLLM's tile; returns whether bits are the same."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    from poc_core.fused.experts import Rows, Tile, product_, product_by_expert_, rows_by_expert
    from workers.vllm.forward.quick_experts import TILE
    from workers.vllm.release import custom_ops

    silu_and_mul: Any = custom_ops.operation("_C::silu_and_mul")

    def random(*shape: int) -> torch.Tensor:
        found: torch.Tensor = torch.randn(shape, device="cuda") / shape[-1] ** 0.5
        return found.bfloat16()

    x, w1 = random(TOKENS, EXPERTS_HIDDEN), random(EXPERTS, 2 * INTERMEDIATE, EXPERTS_HIDDEN)
    w2 = random(EXPERTS, EXPERTS_HIDDEN, INTERMEDIATE)
    logits = torch.randn(TOKENS, EXPERTS, device="cuda")
    share, chosen = logits.softmax(-1).topk(EXPERTS_PER_TOKEN, dim=-1)
    config: dict[str, Any] = fused_moe.try_get_optimal_moe_config(
        w1.size(), w2.size(), EXPERTS_PER_TOKEN, None, TOKENS
    )
    ids = moe_align_block_size(chosen.int(), config["BLOCK_SIZE_M"], EXPERTS, None)
    rows = Rows(*ids)
    tile = Tile(*(config[name] for name in TILE))
    first = x.new_empty(TOKENS, EXPERTS_PER_TOKEN, 2 * INTERMEDIATE)
    opened = x.new_empty(TOKENS * EXPERTS_PER_TOKEN, INTERMEDIATE)
    second = x.new_empty(TOKENS, EXPERTS_PER_TOKEN, EXPERTS_HIDDEN)

    def own(a: Any, b: Any, c: Any, weights: Any, a_token: int) -> None:
        flags = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
        fused_moe.invoke_fused_moe_triton_kernel(
            a, b, c, None, None, weights, *ids, weights is not None, a_token, config,
            compute_type=fused_moe.tl.bfloat16, per_channel_quant=False, block_shape=None,
            B_bias=None, **dict.fromkeys(flags, False),
        )  # fmt: skip

    def own_first() -> None:
        own(x, w1, first, None, EXPERTS_PER_TOKEN)
        silu_and_mul(opened, first.view(-1, 2 * INTERMEDIATE))

    def own_both() -> None:
        own_first()
        own(opened, w2, second, share, 1)

    def both_by_expert() -> None:
        product_(by_expert, x, w1, None, rows, EXPERTS_PER_TOKEN, tile, by_expert=True)
        product_by_expert_(flat, by_expert, w2, shares, rows, tile)

    flat = second.view(-1, EXPERTS_HIDDEN)
    shares = share.flatten()
    by_expert = x.new_empty(rows_by_expert(rows, tile), INTERMEDIATE)
    fine = True
    for name, out, read, theirs, ours in (
        ("experts' first product, gates", opened, [x, w1], own_first,
         lambda: product_(opened, x, w1, None, rows, EXPERTS_PER_TOKEN, tile)),
        ("experts' second product", flat, [opened, w2], lambda: own(opened, w2, second, share, 1),
         lambda: product_(flat, opened, w2, shares, rows, 1, tile)),
        # What lies between them is written and read.
        ("experts' products, by expert", flat, [x, w1, opened, opened, w2], own_both,
         both_by_expert),
    ):  # fmt: skip
        theirs()
        expected = out.clone()
        out.zero_()
        ours()
        same = torch.equal(out, expected)
        before, after = milliseconds(theirs), milliseconds(ours)
        moved = 2 * (out.numel() + sum(one.numel() for one in read))
        told = f"{len(out):,} x {out.shape[1]:,}"
        add_row(table, name, told, before, after, moved, same)
        fine &= same
    return fine


def block_experts_row(rows: Table, middle: int) -> bool:
    """Adds MiniMax's experts in block FP8 with `middle` columns per GPU, as `add_row` does."""
    from vllm import _custom_ops as operations
    from vllm.model_executor.layers.fused_moe import fused_moe

    from poc_core.fused.block_experts import Gates, Quantised, Tile
    from workers.vllm.forward.quick_block_experts import TILES, Call, compute
    from workers.vllm.release import custom_ops

    x = Quantised(*random_blocks(TOKENS, HIDDEN, block=1))
    first = Quantised(*random_blocks(MINIMAX_EXPERTS, 2 * middle, HIDDEN))
    second = Quantised(*random_blocks(MINIMAX_EXPERTS, HIDDEN, middle))
    logits = torch.randn(TOKENS, MINIMAX_EXPERTS, device="cuda")
    share, chosen = logits.softmax(-1).topk(EXPERTS_PER_TOKEN, dim=-1)
    of_experts = (TOKENS, EXPERTS_PER_TOKEN)
    wide, products, out = (
        torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((*of_experts, 2 * middle), (*of_experts, HIDDEN), (TOKENS, HIDDEN))
    )
    blocks = [GROUP, GROUP]
    config: dict[str, Any] = fused_moe.try_get_optimal_moe_config(
        first.numbers.size(), second.numbers.size(), EXPERTS_PER_TOKEN, "fp8_w8a8", TOKENS, blocks
    )
    aligned = custom_ops.rows_of_experts(chosen.int(), config["BLOCK_SIZE_M"], MINIMAX_EXPERTS)
    flags = dict.fromkeys(("use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"), False)
    product: Any = partial(
        fused_moe.invoke_fused_moe_triton_kernel, config=config, compute_type=fused_moe.tl.bfloat16,
        use_fp8_w8a8=True, per_channel_quant=False, block_shape=blocks, **flags,
    )  # fmt: skip

    def own() -> None:
        product(
            x.numbers, first.numbers, wide, x.scales, first.scales, None, *aligned, False,
            EXPERTS_PER_TOKEN,
        )  # fmt: skip
        opened, scales = operations.silu_and_mul_per_block_quant(
            wide.view(-1, 2 * middle), group_size=GROUP, quant_dtype=torch.float8_e4m3fn
        )
        product(opened, second.numbers, products, scales, second.scales, share, *aligned, True, 1)
        operations.moe_sum(products, out)

    ids, space = chosen.int(), (wide, products)
    call = Call(out, x, first, second, share, ids, space, operations.moe_sum, Gates(False))
    own()
    expected, before = out.clone(), milliseconds(own)
    same, times = True, []
    for tiles in TILES:
        way = partial(compute, call, *(Tile(*one) for one in tiles))
        out.zero_()
        way()
        same &= torch.equal(out, expected)
        times.append(milliseconds(way))
    moved = sum(one.numbers.numel() for one in (x, first, second)) + 2 * out.numel()
    # Opened gates and products are written and read.
    moved += 2 * TOKENS * EXPERTS_PER_TOKEN * middle + 4 * products.numel()
    told = f"{TOKENS:,} x {HIDDEN:,}, {middle:,}"
    return add_row(rows, "experts in block FP8, summed", told, before, min(times), moved, same)


def random_blocks(*shape: int, block: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns FP8 numbers (..., rows, columns), and a scale per block of `block` rows."""
    *rest, rows, columns = shape
    numbers = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in numbers.view(-1, rows, columns):
        # Larger ones may become NaN, which equals nothing.
        part.copy_((100 * torch.randn(rows, columns, device="cuda")).clamp(*LIMITS))
    scales = torch.rand(*rest, rows // block, columns // GROUP, device="cuda") / 4000
    return numbers, scales


def arguments(name: str, shape: tuple[int, int], by_column: bool) -> tuple[Any, ...]:
    """Returns the arguments of the operation `name` for a result of the given shape."""
    rows, columns = shape
    generator = torch.Generator("cuda").manual_seed(rows)
    if name == "_C::rms_norm":
        qkv = torch.randn(rows, columns + 8 * HEAD, generator=generator, device="cuda").bfloat16()
        x = qkv[:, :columns].view(rows, HEADS, HEAD)
        weight = torch.ones(HEAD, dtype=torch.bfloat16, device="cuda")
        return torch.zeros(rows, HEADS, HEAD, dtype=torch.bfloat16, device="cuda"), x, weight, 1e-6
    if name == ROTARY:
        angles = torch.linspace(0, 6, HEAD // 2, device="cuda").outer(torch.ones(2, device="cuda"))
        turns = angles.t().flatten()[None] * torch.arange(1024, device="cuda")[:, None]
        turns[:, : HEAD // 2] += torch.pi / 2  # cosines
        query, keys = (
            torch.randn(rows, n, generator=generator, device="cuda").bfloat16()
            for n in (columns, columns // 8)
        )
        positions = torch.arange(rows, device="cuda") % 1024
        return positions, query, keys, HEAD, turns.sin().bfloat16(), True
    if name == CACHE:
        keys, values = (
            torch.randn(rows, columns // HEAD, HEAD, generator=generator, device="cuda").bfloat16()
            for _ in range(2)
        )
        pages = torch.zeros(2, rows // 16, 16, *keys.shape[1:], dtype=torch.uint8, device="cuda")
        slots = torch.arange(rows, device="cuda")
        return keys, values, *pages, slots, "fp8", *torch.ones(2, 1, device="cuda")
    scales = torch.full((columns // GROUP, rows) if by_column else (rows, columns // GROUP), -1.0)
    scales = scales.cuda().t() if by_column else scales.cuda()
    out = torch.zeros(shape, device="cuda").to(torch.float8_e4m3fn)
    is_silu = "silu" in name
    x = torch.randn(rows, 2 * columns if is_silu else columns, generator=generator, device="cuda")
    x = x.bfloat16()
    if is_silu:
        return out, x, scales, GROUP, None, False
    return x, out, scales, GROUP, 1e-10, *LIMITS, False, by_column, False


def _same(theirs: Any, ours: Any) -> bool:
    if not isinstance(theirs, torch.Tensor):
        return bool(theirs == ours)
    if theirs.element_size() == 1:
        theirs, ours = theirs.view(torch.uint8), ours.view(torch.uint8)
    return torch.equal(theirs, ours)


def milliseconds(work: Callable[[], Any]) -> float:
    """Returns the median of TIMES runs. The device stays busy until all of them are launched."""
    busy = torch.zeros(8192, 8192, dtype=torch.bfloat16, device="cuda")
    work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]
    torch.cuda.synchronize()
    for _ in range(TIMES):
        busy @ busy  # some 1.4 ms on an H200
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(events)))


def compare_engines(options: EngineOptions, seq_len: int, seconds: float) -> bool:
    """Prints both rates; returns whether the artifacts are identical."""
    title = f"{options.name}, micro-batches of {BATCH} x {seq_len}"
    rows = table(title, "PROOFLINE_FUSED", "nonces/s", "ratio")
    spec = spec_of(seq_len)
    rates, values = {}, {}
    for switch in ("off", "auto"):
        env = mock.patch.dict(os.environ, {SWITCH: switch})
        with env, clean_stdout(), local_engine(options) as engine:
            rates[switch] = speed(engine, spec, BATCH, None, seconds).nonces_per_s
            values[switch] = artifacts(engine, spec, 2 * BATCH, BATCH)
            parts = time_parts(engine.profile(spec, range(BATCH)), BATCH, LONGEST)
        for part, name, taken_s in parts.longest if parts else ():
            say(f"{switch:>5} {1000 * taken_s:8.2f} ms  {part}: {name[:90]}", markup=False)
        rows.add_row(switch, f"{rates[switch]:.2f}", f"{rates[switch] / rates['off']:.3f}")
    console.print(rows)
    same = values["off"] == values["auto"]
    say(f"values of {2 * BATCH} nonces: {'the same' if same else 'OTHERS'}")
    return same


if __name__ == "__main__":
    run(main)
