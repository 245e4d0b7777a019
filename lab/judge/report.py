"""`proofline report`: compares the proofs of machines, and recommends a rule for validations."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.terminal import UsageError, note, write_json
from lab.judge.chain_pairs import PAIR_COLUMNS, ChainPair, compare_chains
from lab.judge.comparisons import compare
from lab.judge.proof_files import read_machines
from lab.judge.report_findings import Findings, find
from lab.judge.report_page import page
from lab.judge.report_pictures import draw_machines, draw_offsets, draw_power
from lab.picture import check_matplotlib
from lab.tables import result_console, result_table
from poc_core.schemes.artifact import terms

PAGE = "report.html"


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Two or more JSON files of `proofline generate` or `compute --json`, each from "
            "an honest machine or run, for the same block hash, key and nonces. Decode "
            "proofs: chains, whose differences are counted, or answers to validations of "
            "honest chains."
        ),
    ],
    tampered: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of a cheat, for example the same nonces with a smaller or quantized "
            "model; repeatable. Default: generated vectors or chains."
        ),
    ] = None,
    tampered_share: Annotated[
        float,
        typer.Option(min=0.001, max=1, help="Share of the nonces that a cheat tampers with."),
    ] = 1.0,
    fraud_threshold: Annotated[
        float,
        typer.Option(
            min=1e-9,
            max=0.5,
            help="p-value below which the verdict is fraud: the highest rate of false alarms.",
        ),
    ] = terms.FRAUD_THRESHOLD,
    miss: Annotated[
        float, typer.Option(min=1e-9, max=0.5, help="Highest rate of missed cheats.")
    ] = 0.01,
    sample_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Number of nonces that a validation checks. Default: the smallest sufficient "
            "number.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for report.html and its pictures, created if missing."
        ),
    ] = Path("proofline-report"),
    json_only: Annotated[
        bool,
        typer.Option("--json", help="Print only the numbers to stdout, as one line of JSON."),
    ] = False,
) -> None:
    """Compare machines' proofs: draw pictures, and recommend a rule with its error rates.

    Draws the distances of honest and tampered nonces, how false alarms and misses depend on the
    rule, and the mean distances between machines, as PNG files and one HTML page. Recommends
    dist_threshold, p_mismatch and a number of nonces, with exact risks (docs/report.md).

    **Example:** proofline report h200.json a100.json cpu.json --tampered int4.json
    """
    check_matplotlib("report")
    machines = read_machines([*files, *(tampered or [])])
    if len(files) > 1 and all(machine.chains is not None for machine in machines) and not tampered:
        print_pairs(compare_chains(machines), json_only)
        return
    comparisons = compare(machines[: len(files)], machines[len(files) :])
    findings = find(comparisons, tampered_share, fraud_threshold, miss, sample_size)
    write_files(output, findings)
    if json_only:
        write_json(findings.document(), None)
    else:
        print_findings(findings)
    note(f"{output / PAGE} shows the pictures.")


def print_pairs(pairs: Sequence[ChainPair], json_only: bool) -> None:
    """Prints how often the chains of each pair of machines differ.

    Recommends no rule, because a rule needs margins, which only a validation of the chains gives.
    """
    if json_only:
        write_json({"unit": "chains", "pairs": [pair.document for pair in pairs]}, None)
        return
    console = result_console(sys.stdout)
    console.print(result_table("Chains", *PAIR_COLUMNS, rows=(pair.cells for pair in pairs)))
    console.print(
        "How far they lie off is known to who recomputes them: `proofline validate` one machine's"
        " file on another, and give `proofline report` the answers."
    )


def write_files(folder: Path, findings: Findings) -> None:
    """Writes the report to a folder: its pictures and its HTML page. Raises UsageError if the
    folder cannot be written.
    """
    unit = findings.comparisons.unit
    histograms = f"Histograms of each comparison's {unit}s."
    errors = "False alarms and misses by threshold, p_mismatch and nonces."
    heat_map = "Heat map of the mean distance between each two machines."
    drawn = [
        ("distances.png", draw_offsets, "Honest and tampered nonces", histograms),
        ("power.png", draw_power, "Risks by the rule", errors),
        ("machines.png", draw_machines, "Machines", heat_map),
    ]
    if not findings.comparisons.means.size:  # a verdict does not name its machines
        drawn.pop()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw, _, _ in drawn:
            draw(folder / name, findings)
        pictures = [(folder / name, heading, words) for name, _, heading, words in drawn]
        (folder / PAGE).write_text(page(findings, pictures), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"Cannot write into {folder} ({error.strerror}); choose another --output."
        ) from error


def print_findings(findings: Findings) -> None:
    console = result_console(sys.stdout)
    for heading, columns, rows in findings.tables():
        console.print(result_table(heading, *columns, rows=rows))
    for sentence in findings.sentences():
        console.print(sentence)
