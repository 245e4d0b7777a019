"""`proofline calibrate`: finds the r_target that makes a wanted share of a model's nonces valid."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cli import options
from cli.engine_options import takes_engine_options
from cli.nonce_list import parse_nonces
from cli.terminal import UsageError, note, progress_bar
from lab.judge import calibration
from lab.judge.calibration import CalibrationError, check_count
from lab.judge.calibration_tables import print_tables
from lab.judge.histogram import draw
from lab.local_engine import clean_stdout, compute_in_steps, local_engine, progress_title
from lab.picture import check_picture
from lab.tables import print_json
from poc_core.records import ProofSpec
from poc_core.schemes.distance.options import distance_spec
from workers.engines.base import Engine
from workers.engines.options import EngineOptions

DEFAULT_BLOCK_HASHES = 8
MAX_BLOCK_HASHES = 10_000


class Randomizations(StrEnum):
    SIGN_FLIPS = "sign_flips"
    LAYER_HOOKS = "layer_hooks"
    BOTH = "both"

    @property
    def kinds(self) -> list[str]:
        return [kind.value for kind in options.Randomization if self.value in (kind.value, "both")]


@takes_engine_options(for_proofs=True)
def calibrate(
    *,
    nonces: options.Nonces = "0-999",
    block_hashes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_BLOCK_HASHES,
            help="Number of generated block hashes, the same in every run. Default: 8.",
        ),
    ] = None,
    block_hash: Annotated[
        list[str] | None, typer.Option(help="Use this block hash instead; repeatable.")
    ] = None,
    public_key: Annotated[
        str,
        typer.Option(
            help=f"{options.PUBLIC_KEY_HELP} Does not change the distribution of distances."
        ),
    ] = "calibrate",
    valid_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Wanted share of valid nonces, between 0 and 1; repeatable. Default: 0.1, or "
            "none with --r-target."
        ),
    ] = None,
    r_target: Annotated[
        list[float] | None,
        typer.Option(help="Find the valid rate of this r_target (at most 2); repeatable."),
    ] = None,
    randomization: Annotated[
        Randomizations,
        typer.Option(help="Kind of randomization between nonces; both: compare the two."),
    ] = Randomizations.SIGN_FLIPS,
    seq_len: options.SeqLen = options.DEFAULT_SEQ_LEN,
    engine_options: EngineOptions,
    histogram: Annotated[
        Path | None,
        typer.Option(help="Draw the distances to this .png or .svg file. Needs matplotlib."),
    ] = None,
    json_only: options.JsonOnly = False,
    verbose: options.Verbose = False,
) -> None:
    """Find the r_target with which a wanted share of a model's distance proofs is valid.

    Computes the distances of all nonces for each block hash in this process, without a queue.
    Prints tables on stdout: each r_target, its valid rate (percent), and how much both differ
    between block hashes (percentage points). Distances and r_targets have no unit and lie between 0
    and 2. Progress goes to stderr, the engine's log to a file, whose path is printed.

    **Example:** proofline calibrate --model tiny-qwen3 --seq-len 64 --valid-rate 0.1
    """
    check_picture(histogram, "--histogram")
    wanted = parse_nonces(nonces)
    if not public_key:
        raise UsageError("--public-key must not be empty.")
    hashes = chosen_block_hashes(block_hashes, block_hash)
    rates = valid_rate or ([] if r_target else [0.1])
    check_targets(rates, r_target or [], len(wanted))
    specs = {
        kind: [distance_spec(one, public_key, seq_len, kind) for one in hashes]
        for kind in randomization.kinds
    }
    with clean_stdout(verbose) as stdout:
        with local_engine(engine_options) as loaded:
            dtype_used = loaded.info.dtype
            distances = measure(loaded, specs, wanted)
        found = {
            kind: calibration.calibrate(blocks, rates, r_target or [])
            for kind, blocks in distances.items()
        }
        title = (
            f"Distances of {engine_options.name} ({engine_options.engine}, {dtype_used}), seq_len"
            f" {seq_len}: {len(wanted):,} nonces for each of {len(hashes)} block"
            f" hash{'es' if len(hashes) > 1 else ''}"
        )
        if json_only:
            document = {
                "model": engine_options.name,
                "engine": engine_options.engine,
                "dtype": dtype_used,
                "seq_len": seq_len,
                "public_key": public_key,
                "nonces": len(wanted),
                "block_hashes": hashes,
                "randomizations": {kind: asdict(one) for kind, one in found.items()},
            }
            print_json(stdout, document)
        else:
            print_tables(stdout, title, hashes, found)
        if histogram is not None:  # last: a full disk must not lose the numbers
            draw(histogram, title, distances, found)


def chosen_block_hashes(count: int | None, given: Sequence[str] | None) -> list[str]:
    """Returns the block hashes of --block-hash, or else `count` generated ones, which are the same
    in every run.

    Raises UsageError if both options are given, or if a given hash is empty or repeated.
    """
    if not given:
        made_up = range(DEFAULT_BLOCK_HASHES if count is None else count)
        return [
            hashlib.sha256(f"proofline calibrate {index}".encode()).hexdigest() for index in made_up
        ]
    if count is not None:
        raise UsageError(
            "--block-hashes generates block hashes, --block-hash names them; give one of the two."
        )
    if "" in given or len(set(given)) < len(given):
        raise UsageError("A --block-hash must not be empty, and not be given twice.")
    return list(given)


def check_targets(rates: Sequence[float], r_targets: Sequence[float], n_nonces: int) -> None:
    for rate in rates:
        if not 0 < rate < 1:  # also refuses NaN
            raise UsageError(
                f"--valid-rate must be above 0 and below 1, not {rate:g}; 10 % are 0.1."
            )
        try:
            check_count(n_nonces, rate)
        except CalibrationError as error:
            raise UsageError(f"{error} See --nonces.") from None
    for r_target in r_targets:
        if not 0 < r_target <= 2:
            raise UsageError(f"--r-target must be above 0 and at most 2, not {r_target:g}.")


def measure(
    engine: Engine, specs: Mapping[str, Sequence[ProofSpec]], nonces: Sequence[int]
) -> dict[str, list[np.ndarray]]:
    """Computes the distances of all nonces for each spec. Returns, for each name in `specs`, one
    array float64 (n,) per spec.

    Leaves out nonces whose model output is not finite, and reports their number on stderr.
    """
    distances: dict[str, list[np.ndarray]] = {}
    with progress_bar("nonces") as bar:
        task = bar.add_task(
            progress_title(engine), total=len(nonces) * sum(map(len, specs.values()))
        )
        for name, blocks in specs.items():
            distances[name] = []
            for spec in blocks:
                values: list[Any] = []
                for step in compute_in_steps(engine, spec, nonces):
                    values += step
                    bar.advance(task, len(step))
                distances[name].append(
                    np.array([value for value in values if value is not None], np.float64)
                )
    n_found = sum(len(block) for blocks in distances.values() for block in blocks)
    n_excluded = len(nonces) * sum(map(len, specs.values())) - n_found
    if n_excluded:
        note(
            f"{n_excluded} of the distances could not be computed, because the output was not"
            " finite, and are left out."
        )
    return distances
