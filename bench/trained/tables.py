"""The tables of docs/proofs.md, decode.md and chat.md, and the picture, from stored results."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.trained.machines import (
    ANSWERED,
    CHAINED,
    MACHINES,
    N_ANSWERS,
    N_CHAINS,
    PARTS,
    PROOFS,
    VALIDATOR,
    path,
    read,
)
from cli.ask.jobs import job_body
from cli.ask.validate import only_nonces
from cli.demo_model import DEMO_MODEL
from cli.options import Proof
from lab.judge.power import Evidence, Sample, powers, recommend
from lab.judge.report_findings import NETWORKS_SAMPLE, RATE_THRESHOLDS, percent
from lab.judge.statistics import least_frauds
from poc_core.records import JobRequest
from poc_core.schemes.artifact.encoding import decode_vector
from poc_core.schemes.artifact.requests import GenerateBody
from poc_core.schemes.artifact.terms import network_terms
from poc_core.schemes.contract import contract_of

ROOT = Path(__file__).resolve().parents[2]
NETWORK = network_terms(DEMO_MODEL)
TRIES, N_TRIED = 20, 10  # validations, and their nonces, which are drawn from the proofs
RISK = 0.01  # of false alarms, for tests other than the network's
SIZES = (10, 50)  # nonces

Samples = dict[str, npt.NDArray[np.float64]]


def shown(name: str) -> str:
    honest = next(one.honest for one in MACHINES if one.name == name) if name in _NAMES else False
    if name == VALIDATOR.name:
        return "honest: 20 at once"
    return f"honest: {name}" if honest else name


_NAMES = {one.name for one in MACHINES}


def row(*cells: object) -> str:
    return f"|{'|'.join(map(str, cells))}|"


def header(*cells: str) -> list[str]:
    return [row(*cells), f"|{'---|' * len(cells)}"]


# --- proofs -------------------------------------------------------------------------------------


def proofs(folder: Path, seq_len: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the proofs by machine, if all machines have them."""
    parts = [
        part
        for part in PARTS
        if part.startswith(f"proof-{seq_len}-")
        and all(path(folder, one.name, part).exists() for one in MACHINES)
    ]
    return {one.name: [read(folder, one.name, part) for part in parts] for one in MACHINES}


def vectors(found: list[dict[str, Any]]) -> npt.NDArray[np.float64]:
    texts = [one["vector_b64"] for proof in found for one in proof["artifacts"]]
    return np.stack([decode_vector(text, 12) for text in texts]).astype(np.float64)


def distances(found: dict[str, list[dict[str, Any]]]) -> Samples:
    """Returns the L2 distances to the validator by machine."""
    own = vectors(found[VALIDATOR.name])
    return {
        name: np.linalg.norm(vectors(theirs) - own, axis=1)
        for name, theirs in found.items()
        if name != VALIDATOR.name
    }


def validate(own: dict[str, Any], claimed: dict[str, Any], nonces: Sequence[int]) -> dict[str, Any]:
    """Returns the verdict of `proofline validate` on some nonces."""
    request = claimed["request"]
    body = job_body(
        model=DEMO_MODEL,
        block_hash=request["block_hash"],
        public_key=request["public_key"],
        block_height=0,
        nonces=list(nonces),
        proof=Proof(request["params"]["seq_len"], request["params"]["k_dim"]),
        batch_size=None,
    )
    received = only_nonces(claimed["artifacts"], list(nonces))
    asked = GenerateBody.model_validate(body | {"validation": {"artifacts": received}})
    claims = asked.claims()
    assert claims is not None
    return contract_of("artifact").verdict(
        asked.spec(),
        JobRequest(block_height=0, node_id=0, node_count=1, terms=asked.terms(False)),
        nonces,
        [one["vector_b64"] for one in only_nonces(own["artifacts"], list(nonces))],
        [claims[nonce] for nonce in nonces],
    )


def n_frauds(own: list[dict[str, Any]], claimed: list[dict[str, Any]]) -> int:
    """Returns the number of frauds in TRIES validations of different nonces."""
    dice = np.random.default_rng(0)
    found = 0
    for n in range(TRIES):
        pair = own[n % len(own)], claimed[n % len(own)]
        known = [one["nonce"] for one in pair[0]["artifacts"]]
        nonces = sorted(dice.choice(known, N_TRIED, replace=False).tolist())
        found += validate(*pair, nonces)["fraud_detected"]
    return found


def proof_table(folder: Path) -> Iterator[str]:
    from scipy.stats import binom

    short, long = (proofs(folder, seq_len) for seq_len in PROOFS)
    offsets, at_1024 = distances(short), distances(long)
    limit = NETWORK.dist_threshold
    over = f"over {limit:g}"
    yield from header(
        "Machine",
        "Mean",
        "Largest",
        over.capitalize(),
        f"Fraud verdicts in {TRIES} validations",
        f"Fraud probability, {NETWORKS_SAMPLE} nonces",
        f"seq_len 1024: mean, {over}",
    )
    fewest = least_frauds(NETWORKS_SAMPLE, NETWORK.p_mismatch, NETWORK.fraud_threshold)
    for name, apart in offsets.items():
        beyond = float(np.mean(apart > limit))
        yield row(
            shown(name),
            *(f"{number:.3f}" for number in (apart.mean(), apart.max())),
            percent(beyond),
            n_frauds(short[VALIDATOR.name], short[name]),
            percent(float(binom.sf(fewest - 1, NETWORKS_SAMPLE, beyond))),
            f"{at_1024[name].mean():.3f}, {percent(float(np.mean(at_1024[name] > limit)))}",
        )


def power_table(folder: Path) -> Iterator[str]:
    """Yields the terms that detect int8, and the share of cheats that each test finds."""
    samples = {
        name: Sample(name, np.sort(apart)) for name, apart in distances(proofs(folder, 256)).items()
    }
    honest = [samples[one.name] for one in MACHINES if one.name in samples and one.honest]
    cheats = [samples[one.name] for one in MACHINES if not one.honest]
    nearest = Evidence(honest, [samples["int8"]])
    rule = recommend(nearest, RISK, RISK).rule
    risks, at_worst = nearest.risks(rule), nearest.risks(rule, at_worst=True)
    yield (
        f"Counting mismatches detects the cheat `int8` with dist_threshold {rule.dist_threshold:g},"
        f" p_mismatch {rule.p_mismatch:g}, fraud_threshold {rule.fraud_threshold:g} and {rule.n:,}"
        f" nonces or more. With these four values, {percent(risks.false_alarm)} of the honest"
        f" machines' validations give the verdict fraud, at worst {percent(at_worst.false_alarm)}."
        f" The table shows the share of cheats that each test detects with {percent(RISK)} false"
        f" alarms:"
    )
    yield ""
    hard = ("int8", "fp8")
    yield from header("Test", "Nonces", *hard)
    for n in SIZES:
        for one in powers(
            Evidence(honest, cheats), [NETWORK.dist_threshold, rule.dist_threshold], n, RISK
        ):
            yield row(one.test, n, *(percent(one.found[name]) for name in hard))


# --- chains and chats ---------------------------------------------------------------------------


def chain_table(folder: Path) -> Iterator[str]:
    """Yields for each machine the first differences from the validator's chains, and margins."""
    yield from header(
        "Machine",
        f"Different chains of {N_CHAINS}",
        "Mean first differing step",
        "Mean margin",
        "Largest margin",
        *(f"% over {limit:g}" for limit in RATE_THRESHOLDS),
    )
    own = read(folder, VALIDATOR.name, "chains")
    for name in CHAINED:
        found = read(folder, name, "judged-chains")
        parted = list(first_differences(own, read(folder, name, "chains")))
        margins = np.array(found)[:, 1]
        yield row(
            shown(name),
            len(parted),
            f"{np.mean(parted):.0f}" if parted else "-",
            f"{margins.mean():.4f}",
            f"{margins.max():.4f}",
            *(f"{100 * np.mean(margins > limit):.0f}" for limit in RATE_THRESHOLDS),
        )


def first_differences(own: dict[str, Any], other: dict[str, Any]) -> Iterator[int]:
    """Yields the first different step of each pair of chains."""
    for one, two in zip(own["artifacts"], other["artifacts"], strict=True):
        pairs = zip(one["k_points_steps"], two["k_points_steps"], strict=True)
        step = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
        if step is not None:
            yield step


def chat_table(folder: Path) -> Iterator[str]:
    yield from header(
        "Executor",
        "Lowest similarity",
        "Highest similarity",
        f"Valid of {N_ANSWERS} (calibrated models)",
        f"Valid of {N_ANSWERS} (other models)",
    )
    for name in ANSWERED:
        found = read(folder, name, "judged-answers")
        near = [one["similarity"] for one in found if one["similarity"] is not None]
        yield row(
            shown(name),
            *(f"{number:.3f}" for number in (min(near), max(near))),
            *(
                sum(one["reasons"][rules] == "pass" for one in found)
                for rules in ("calibrated", "others")
            ),
        )


# --- all ----------------------------------------------------------------------------------------


def tables(folder: Path) -> dict[str, list[str]]:
    """Returns the lines of tables by page, for pages whose results are complete."""
    found: dict[str, list[str]] = {}
    if all(proofs(folder, seq_len)[VALIDATOR.name] for seq_len in PROOFS):
        found["docs/proofs.md"] = [*proof_table(folder), "", *power_table(folder)]
    for page, judged, names, table in (
        ("docs/decode.md", "judged-chains", CHAINED, chain_table),
        ("docs/chat.md", "judged-answers", ANSWERED, chat_table),
    ):
        if all(path(folder, name, judged).exists() for name in names):
            found[page] = list(table(folder))
    return found


def draw(samples: Samples, picture: Path) -> None:
    """Draws a box plot of each machine's distances, and the network's threshold."""
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
        box.set_facecolor(HONEST if shown(name).startswith("honest") else TAMPERED)
    limit = NETWORK.dist_threshold
    axes.axvline(limit, color=MARK, linestyle="--", label=f"the network's threshold, {limit:g}")
    axes.set_yticks(range(1, len(names) + 1), [shown(name) for name in names])
    axes.set(xlabel="L2 distance to the validator's artifact (box: half, line: 98 %)")
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)
