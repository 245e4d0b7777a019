"""What tensor parallelism would gain by computing one half of a micro-batch during the other's sum.

    python -m bench.all_reduce  # on a host with two GPUs

The outline of a layer of MiniMax-M2.7 on two GPUs: dense products that take as long as attention, a
sum over the ranks, experts by the kernels of proofs, another sum. All rows at a time are compared
with two halves in turns, whose sums run on a second stream while the other half computes. The
additional padding of the halves' blocks is included.
"""

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any

import torch
import typer

from bench.harness import machine
from bench.harness.report import run, say

TOKENS, HIDDEN, EXPERTS, A_TOKEN, MIDDLE = 32 * 1024, 3072, 256, 8, 768
# Products of (TOKENS, HIDDEN) and (HIDDEN, HIDDEN) that take about as long as a layer's attention.
DENSE = 4
LAYERS, TIMES = 6, 5
PORT = 29_531


class Layer:
    """The computation of one rank, with random weights."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(rank)
        self.dense = torch.randn(HIDDEN, HIDDEN, device="cuda").bfloat16() / HIDDEN**0.5
        self.share, self.chosen = (
            torch.randn(TOKENS, EXPERTS, device="cuda").softmax(-1).topk(A_TOKEN, -1)
        )
        self.first = self._weights(2 * MIDDLE, HIDDEN)
        self.second = self._weights(HIDDEN, MIDDLE)

    def _weights(self, rows: int, columns: int) -> Any:
        from workers.vllm.kernels.block_experts import Quantised

        numbers = torch.empty(EXPERTS, rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
        for one in numbers:
            one.copy_(torch.randn(rows, columns, device="cuda"))
        scales = torch.rand(EXPERTS, rows // 128, columns // 128, device="cuda")
        return Quantised(numbers, scales)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(DENSE):
            x = x @ self.dense
        return x

    def experts(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        from workers.vllm.kernels.block_experts import Gates, Quantised, Tile
        from workers.vllm.kernels.quantise import quantise_
        from workers.vllm.kernels.quick_block_experts import TILES, Call, compute

        numbers = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(len(x), HIDDEN // 128, dtype=torch.float32)
        quantise_(numbers, scales, x, 1e-10)
        out = torch.empty_like(x)
        call = Call(
            out, Quantised(numbers, scales), self.first, self.second, self.share[rows].contiguous(),
            self.chosen[rows].int(), (x[:0], x[:0]), lambda given, to: torch.sum(given, 1, out=to),
            gates=Gates(False),
        )  # fmt: skip
        # the first pair whose products both have a tile
        first, second = next((first, second) for first, second in TILES if first and second)
        compute(call, Tile(*first), Tile(*second))
        return out


def whole(layer: Layer, x: torch.Tensor, sums: torch.cuda.Stream) -> None:
    for _ in range(LAYERS):
        x = layer.attention(x)
        torch.distributed.all_reduce(x)
        x = layer.experts(x, slice(None))
        torch.distributed.all_reduce(x)


def halves(layer: Layer, x: torch.Tensor, sums: torch.cuda.Stream) -> None:
    middle = TOKENS // 2
    rows = [slice(None, middle), slice(middle, None)]
    parts = [x[one] for one in rows]
    summed: list[torch.cuda.Event | None] = [None, None]
    main = torch.cuda.current_stream()
    for _ in range(LAYERS):
        for part in ("attention", "experts"):
            for half in (0, 1):
                if (event := summed[half]) is not None:
                    main.wait_event(event)
                given = parts[half]
                is_dense = part == "attention"
                found = layer.attention(given) if is_dense else layer.experts(given, rows[half])
                sums.wait_stream(main)
                with torch.cuda.stream(sums):
                    torch.distributed.all_reduce(found)
                found.record_stream(sums)
                summed[half] = sums.record_event()
                parts[half] = found
    main.wait_stream(sums)


def without_sums(layer: Layer, x: torch.Tensor, sums: torch.cuda.Stream) -> None:
    for _ in range(LAYERS):
        x = layer.experts(layer.attention(x), slice(None))


def milliseconds(compute: Callable[[], Any]) -> float:
    """Returns the median time of a layer."""
    compute()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]
    torch.distributed.barrier()
    events[0].record()
    for event in events[1:]:
        compute()
        event.record()
    events[-1].synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(events))) / LAYERS


def measure(rank: int, ranks: int, port: int) -> None:
    """Runs in the process of each rank; rank 0 prints."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    layer = Layer(rank)
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    sums = torch.cuda.Stream()
    took = {
        way.__name__: milliseconds(lambda way=way: way(layer, x, sums))  # type: ignore[misc]
        for way in (whole, halves, without_sums, whole, halves)
    }
    alone = milliseconds(lambda: [torch.distributed.all_reduce(x) for _ in range(LAYERS)])
    if rank == 0:
        say(machine.describe())
        for name, ms in took.items():
            say(f"{name.replace('_', ' ')}: {ms:.3f} ms a layer")
        rate = x.numel() * x.element_size() / alone / 1e6
        say(f"a sum alone: {alone:.3f} ms, {rate:.0f} GB/s")
        say(f"two halves in turns: {100 * (took['whole'] / took['halves'] - 1):+.1f} %")
    torch.distributed.destroy_process_group()


def main(
    gpus: Annotated[int, typer.Option(min=2, help="Tensor-parallel ranks.")] = 2,
    port: Annotated[int, typer.Option(help="Of this host, for the ranks to meet.")] = PORT,
) -> None:
    """Prints a layer's time with sums between and during computation."""
    torch.multiprocessing.spawn(measure, (gpus, port), nprocs=gpus)


if __name__ == "__main__":
    run(main)
