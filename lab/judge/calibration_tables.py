"""Prints the tables of `proofline calibrate`: distances, r_targets and valid rates."""

from collections.abc import Callable, Mapping, Sequence
from typing import IO

from rich.table import Table

from cli.nonce_list import shortened
from lab.judge.calibration import BORDERLINE, Calibration, Target
from lab.tables import result_console, result_table

HASH_CHARACTERS = 20


def print_tables(
    stdout: IO[str],
    title: str,
    block_hashes: Sequence[str],
    calibrations: Mapping[str, Calibration],
) -> None:
    console = result_console(stdout)
    console.print(title)
    for table in (distribution_table(calibrations), target_table(calibrations)):
        console.print(table)
    if len(block_hashes) > 1:
        console.print(block_table(block_hashes, calibrations))
    stdout.flush()


def distribution_table(calibrations: Mapping[str, Calibration]) -> Table:
    headers = ("randomization", "number", "mean", "standard deviation", "lowest", "highest")
    table = result_table("Distances", *headers)
    for randomization, found in calibrations.items():
        numbers = (found.mean, found.std, found.lowest, found.highest)
        table.add_row(randomization, f"{found.n:,}", *(f"{number:.5f}" for number in numbers))
    return table


def target_table(calibrations: Mapping[str, Calibration]) -> Table:
    """Returns a table with one column for each randomization and r_target."""
    targets = [(name, target) for name, found in calibrations.items() for target in found.targets]
    table = result_table("Targets", "", *(name for name, _ in targets))
    rows: list[tuple[str, Callable[[Target], str]]] = [
        ("wanted valid rate", lambda t: _percent(t.wanted_rate)),
        ("r_target", lambda t: f"{t.r_target:.6f}"),
        ("valid rate", lambda t: _percent(t.valid_rate)),
        ("  of the block hash with the lowest", lambda t: _percent(min(t.block_rates))),
        ("  of the block hash with the highest", lambda t: _percent(max(t.block_rates))),
        ("  spread: highest - lowest", lambda t: _points(t.rate_spread)),
        ("  spread that counting alone explains", lambda t: _points(t.counting_spread)),
        ("  standard deviation across block hashes", lambda t: _points(t.rate_std)),
        ("  standard deviation that counting alone explains", lambda t: _points(t.counting_std)),
        (
            "each block hash's own r_target for that rate",
            lambda t: "" if t.block_r_targets else "-",
        ),
        ("  lowest", lambda t: _distance(min(t.block_r_targets or [], default=None))),
        ("  highest", lambda t: _distance(max(t.block_r_targets or [], default=None))),
        ("  spread: highest - lowest", lambda t: _distance(t.r_target_spread)),
        ("  standard deviation", lambda t: _distance(t.r_target_std)),
        (
            f"borderline: share of the valid that are so by less than {BORDERLINE:.4f}",
            lambda t: _percent(t.borderline),
        ),
    ]
    for name, cell in rows:
        table.add_row(name, *(cell(target) for _, target in targets))
    return table


def block_table(block_hashes: Sequence[str], calibrations: Mapping[str, Calibration]) -> Table:
    """Returns a table of block hashes: the mean distance, and the valid rate at each r_target."""
    headers = ["block hash"]
    for name, found in calibrations.items():
        headers.append(f"{name}\nmean distance")
        headers += [f"{name}\nvalid at {target.r_target:.4f}" for target in found.targets]
    table = result_table("Block hashes", *headers)
    for index, block_hash in enumerate(block_hashes):
        cells = []
        for found in calibrations.values():
            cells.append(f"{found.block_means[index]:.5f}")
            cells += [_percent(target.block_rates[index]) for target in found.targets]
        table.add_row(shortened(block_hash, HASH_CHARACTERS), *cells)
    return table


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.2f} %"


def _points(rate: float | None) -> str:
    """Formats a difference between two rates in percentage points."""
    return "-" if rate is None else f"{100 * rate:.2f} points"


def _distance(distance: float | None) -> str:
    return "-" if distance is None else f"{distance:.6f}"
