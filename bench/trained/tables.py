"""The tables of docs/proofs.md, decode.md and chat.md, and their picture, of a folder's results."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.trained.machines import MACHINES, N_NONCES, N_PROOFS, VALIDATOR, path, read
from lab.judge.comparisons import TAMPERED_TERMS, distances
from lab.judge.power import Evidence, Sample, powers
from lab.judge.proof_files import read_machines
from lab.judge.report_findings import NETWORKS_SAMPLE, RATE_THRESHOLDS, percent
from poc_core.arithmetic.statistics import least_frauds
from poc_core.schemes.artifact.thresholds import DIST_THRESHOLD, network_terms

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/pictures/trained.svg"
NETWORK = network_terms("")
RISK = 0.01  # of false alarms, for the tests that are tried beside the network's
SIZES = (10, 50, NETWORKS_SAMPLE)  # nonces

Samples = dict[str, npt.NDArray[np.float64]]


def kind(name: str) -> str:
    honest = next((one.honest for one in MACHINES if one.name == name), name == VALIDATOR.name)
    return f"honest: {name}" if honest else name


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(*cells: str) -> list[str]:
    return [row(*cells), f"|{'---|' * len(cells)}"]


def artifact_samples(folder: Path) -> Samples:
    """L2 distances to the validator, by machine: (N_PROOFS * N_NONCES,), a proof after another."""
    validator, *others = read_machines([path(folder, one.name, "artifacts") for one in MACHINES])
    names = [one.name for one in MACHINES[1:]]
    return {
        name: distances(validator, other, TAMPERED_TERMS)
        for name, other in zip(names, others, strict=True)
    }


def frauds(offsets: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.bool_]:
    """Of proofs of n nonces each: whether the network's terms call it a fraud."""
    beyond = (offsets.reshape(-1, n) > NETWORK.dist_threshold).sum(axis=1)
    fewest = least_frauds(n, NETWORK.p_mismatch, NETWORK.fraud_threshold)
    return np.asarray(beyond >= fewest)


def artifact_table(samples: Samples) -> Iterator[str]:
    from scipy.stats import binom

    limit = NETWORK.dist_threshold
    yield from header(
        "machine",
        "mean",
        "median",
        "largest",
        f"over {DIST_THRESHOLD:g}",
        f"over {limit:g}",
        f"frauds of {N_PROOFS} proofs of {N_NONCES} nonces",
        f"chance with {NETWORKS_SAMPLE} nonces",
    )
    fewest = least_frauds(NETWORKS_SAMPLE, NETWORK.p_mismatch, NETWORK.fraud_threshold)
    for name, offsets in samples.items():
        beyond = float(np.mean(offsets > limit))
        yield row(
            kind(name),
            *(f"{number:.3f}" for number in (offsets.mean(), np.median(offsets), offsets.max())),
            percent(float(np.mean(offsets > DIST_THRESHOLD))),
            percent(beyond),
            int(frauds(offsets, N_NONCES).sum()),
            percent(float(binom.sf(fewest - 1, NETWORKS_SAMPLE, beyond))),
        )


def power_table(samples: Samples) -> Iterator[str]:
    """The share of cheats that each test finds, at RISK of false alarms."""
    sorted_ = [
        (machine.honest, Sample(machine.name, np.sort(samples[machine.name])))
        for machine in MACHINES
        if machine.name in samples
    ]
    evidence = Evidence(
        [one for honest, one in sorted_ if honest], [one for honest, one in sorted_ if not honest]
    )
    cheats = [one.name for one in evidence.tampered]
    yield from header("test", "nonces", *cheats)
    for n in SIZES:
        for one in powers(evidence, [NETWORK.dist_threshold], n, RISK):
            yield row(one.test, n, *(percent(one.found[name]) for name in cheats))


def chain_table(judged: dict[str, list[list[float]]]) -> Iterator[str]:
    yield from header(
        "machine",
        "chains with another point",
        "mean margin",
        "largest",
        *(f"over {limit:g}" for limit in RATE_THRESHOLDS),
    )
    for name, found in judged.items():
        points, margins = np.array(found).T
        yield row(
            kind(name),
            percent(float(np.mean(points > 0))),
            f"{margins.mean():.4f}",
            f"{margins.max():.4f}",
            *(percent(float(np.mean(margins > limit))) for limit in RATE_THRESHOLDS),
        )


def chat_table(judged: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield from header(
        "executor",
        "mean distance (worst answer)",
        "similarity",
        "valid, calibrated rules",
        "valid, rules of other models",
        "reasons",
    )
    for name, found in judged.items():
        far = [one["distance"] for one in found]
        near = [one["similarity"] for one in found if one["similarity"] is not None]
        reasons = {one["reasons"][rules] for one in found for rules in one["reasons"]} - {"pass"}
        yield row(
            kind(name),
            f"{np.mean(far):.4f} ({max(far):.4f})",
            f"{min(near):.3f} to {max(near):.3f}" if near else "-",
            *(
                f"{sum(one['reasons'][rules] == 'pass' for one in found)} of {len(found)}"
                for rules in ("calibrated", "others")
            ),
            ", ".join(sorted(reasons)) or "-",
        )


def tables(folder: Path) -> dict[str, list[str]]:
    """Title -> lines, of the parts that the folder holds."""
    found = {}
    if path(folder, MACHINES[-1].name, "artifacts").exists():
        samples = artifact_samples(folder)
        found["artifacts"] = list(artifact_table(samples))
        found["tests"] = list(power_table(samples))
    for part, table in (("chains", chain_table), ("answers", chat_table)):
        if path(folder, VALIDATOR.name, f"judged-{part}").exists():
            found[part] = list(table(read(folder, VALIDATOR.name, f"judged-{part}")))
    return found


def draw(samples: Samples, picture: Path) -> None:
    """A box for each machine's distances, half of them inside, and the network's threshold."""
    import matplotlib

    from lab.judge.report_pictures import HONEST, MARK, TAMPERED

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    # The same numbers give the same file.
    plt.rcParams.update({"svg.hashsalt": "proofline", "svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(figsize=(8.6, 3.6), layout="constrained")
    names: Sequence[str] = list(samples)[::-1]
    boxes = axes.boxplot(
        [samples[name] for name in names],
        orientation="horizontal",
        patch_artist=True,
        whis=(1, 99),
        sym="",
        widths=0.6,
        medianprops={"color": MARK},
    )
    for name, box in zip(names, boxes["boxes"], strict=True):
        box.set_facecolor(HONEST if kind(name).startswith("honest") else TAMPERED)
    limit = NETWORK.dist_threshold
    axes.axvline(limit, color=MARK, linestyle="--", label=f"the network's threshold, {limit:g}")
    axes.set_yticks(range(1, len(names) + 1), [kind(name) for name in names])
    axes.set(xscale="log", xlabel="L2 distance to the validator's artifact (box: half, line: 98 %)")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)
