"""Prints the tables of `bench`, and builds its JSON result."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

from rich.table import Table

from lab.measure.artifact_distance import Distance
from lab.measure.moe_backends import NONCES, Comparison
from lab.measure.published import BesidePublished
from lab.measure.speed import SeqLenSpeeds, Speed, Speeds
from lab.measure.speed_advice import Advice
from lab.measure.time_parts import PARTS, TimeParts
from lab.tables import result_console, result_table


def document(
    speeds: Speeds,
    advice: Advice,
    beside: BesidePublished | None = None,
    experts: Comparison | None = None,
) -> dict[str, Any]:
    """Returns the result of `bench` as a JSON document.

    Times are in milliseconds, shares from 0 to 1. Rates are in nonces per second, except in
    `network`, where they are in nonces per minute.
    """
    fields = {name: value for name, value in vars(speeds).items() if name != "seq_lens"}
    return fields | {
        "seq_lens": [_seq_len(one) for one in speeds.seq_lens],
        "advice": asdict(advice),
        "network": beside and asdict(beside) | {"per_host": beside.per_host},
        "moe_backends": experts and _experts(experts),
    }


def _seq_len(one: SeqLenSpeeds) -> dict[str, Any]:
    return {
        "seq_len": one.seq_len,
        "sizes": [
            {"whole": asdict(whole), "sliced": asdict(sliced)} for whole, sliced in one.sizes
        ],
        "trades": [asdict(trade) for trade in one.trades],
        "share_of_peak": one.parts and one.parts.share_of_peak(one.best),
        "parts": one.parts and _parts(one.parts),
    }


def _experts(experts: Comparison) -> dict[str, Any]:
    default = experts.default
    return {
        "seq_len": default.spec.seq_len,
        "nonces": NONCES,
        "default": {
            "nonces_per_s": default.nonces_per_s,
            "batch": default.batch,
            "small_batch": default.small_batch,
            "distance": asdict(default.by_size),
        },
        "tried": [asdict(one) for one in experts.tried],
        "proposal": experts.proposal,
    }


def _parts(parts: TimeParts) -> dict[str, Any]:
    return {
        "nonces": parts.n,
        "device": parts.device,
        "peak_tflops": parts.peak_flops / 1e12,
        "matrices_share_of_peak": parts.matrices_share_of_peak,
        "ms": {part: 1000 * seconds for part, seconds in parts.seconds.items()},
        "longest": [
            {"part": part, "name": name, "ms": 1000 * seconds}
            for part, name, seconds in parts.longest
        ],
    }


def print_speeds(
    stdout: IO[str],
    title: str,
    speeds: Speeds,
    advice: Advice,
    beside: BesidePublished | None = None,
) -> None:
    console = result_console(stdout)
    console.print(title)
    for one in speeds.seq_lens:
        console.print(size_table(one, speeds.max_step_ms))
        console.print(trade_table(one))
    with_parts = [one for one in speeds.seq_lens if one.parts]
    if with_parts:
        console.print(part_table(with_parts))
    for line in beside.lines() if beside else ():
        console.print(line)
    console.print("Set:")
    for setting, reason in zip(advice.settings(), advice.reasons, strict=True):
        console.print(f"  {setting}\n      {reason}")
    stdout.flush()


def print_backends(stdout: IO[str], experts: Comparison) -> None:
    console = result_console(stdout)
    console.print(backend_table(experts))
    for one in experts.tried:
        console.print(one.line, markup=False, soft_wrap=True)  # vLLM's texts contain brackets
    stdout.flush()


def backend_table(experts: Comparison) -> Table:
    default = experts.default
    table = result_table(
        f"Experts' products at seq_len {default.spec.seq_len}, and how far artifacts of {NONCES}"
        " nonces lie from the default's",
        "backend",
        "nonces/s",
        "of the\ndefault's",
        "L2, mean",
        "L2, largest",
    )
    table.add_row("default", f"{default.nonces_per_s:,.1f}", "1.00", "", "")
    sizes = f"default, batches of {default.small_batch} from those of {default.batch}"
    table.add_row(sizes, "", "", *apart(default.by_size))
    for one in experts.tried:
        if one.nonces_per_s is None or one.distance is None:
            table.add_row(one.backend, *("-" * 4))
            continue
        over = f"{one.nonces_per_s / default.nonces_per_s:.2f}"
        table.add_row(one.backend, f"{one.nonces_per_s:,.1f}", over, *apart(one.distance))
    return table


def size_table(one: SeqLenSpeeds, max_step_ms: float) -> Table:
    table = result_table(
        f"Micro-batches at seq_len {one.seq_len}, slices for POC_MAX_STEP_MS {max_step_ms:g}",
        "nonces",
        "tokens",
        "whole\nnonces/s",
        "of the\nmatrix peak",
        "in slices\nnonces/s",
        "slices",
        "chat waits\nat most",
    )
    for whole, sliced in one.sizes:
        share = one.parts.share_of_peak(whole.nonces_per_s) if one.parts else None
        tokens = f"{whole.n * one.seq_len:,}"
        table.add_row(
            f"{whole.n:,}", tokens, rate(whole), percent(share), rate(sliced), *slices(sliced)
        )
    return table


def trade_table(one: SeqLenSpeeds) -> Table:
    headers = (
        "POC_MAX_STEP_MS",
        "nonces",
        "slices",
        "chat waits\nat most",
        "nonces/s",
        "rate lost",
    )
    table = result_table(f"What short waits cost at seq_len {one.seq_len}", *headers)
    for trade in one.trades:
        sliced = trade.sliced
        limit = f"{trade.max_step_ms:g}"
        table.add_row(limit, f"{sliced.n:,}", *slices(sliced), rate(sliced), percent(trade.lost))
    return table


def part_table(with_parts: Sequence[SeqLenSpeeds]) -> Table:
    """Returns a table of the time that each part of a micro-batch takes, with one column per
    seq_len.
    """
    table = result_table(
        "Time by part of a whole micro-batch", "", *(f"seq_len {one.seq_len}" for one in with_parts)
    )
    found = [one.parts for one in with_parts if one.parts]
    for part in PARTS:
        cells = [
            f"{1000 * parts.seconds[part]:,.1f} ms  {percent(parts.share(part)):>7}"
            for parts in found
        ]
        table.add_row(part, *cells)
    table.add_row(
        "together", *(f"{1000 * parts.total_s:,.1f} ms  {percent(1.0):>7}" for parts in found)
    )
    table.add_row(
        "matrix peak of a device", *(f"{parts.peak_flops / 1e12:,.2f} TFLOP/s" for parts in found)
    )
    table.add_row(
        "of it, while matrix products run",
        *(percent(parts.matrices_share_of_peak) for parts in found),
    )
    return table


def apart(distance: Distance) -> tuple[str, str]:
    return f"{distance.mean:.6f}", f"{distance.largest:.6f}"


def rate(speed: Speed) -> str:
    return f"{speed.nonces_per_s:,.1f}"


def slices(speed: Speed) -> tuple[str, str]:
    return str(speed.n_slices), f"{speed.chat_waits_ms:,.0f} ms"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
