"""Draws docs/pictures/distances.svg from the reference's artifacts in tests/data/golden."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "data" / "golden"
PICTURE = ROOT / "docs" / "pictures" / "distances.svg"
MODELS = ("tiny-qwen3", "tiny-llama", "tiny-qwen3-moe")
DEVICES = ("cpu-{}-float32", "cpu-{}-bfloat16", "h200-{}-bfloat16")
K_DIM = 12

Artifacts = dict[tuple[Any, ...], np.ndarray[Any, np.dtype[np.float32]]]


def artifacts(file: Path) -> Artifacts:
    """Returns the vectors of K_DIM numbers in a golden file by everything they depend on."""
    return {
        (
            case["block_hash"],
            case["public_key"],
            case["seq_len"],
            case["poc_stronger_rng"],
            artifact["nonce"],
        ): vector
        for case in json.loads(file.read_text())["artifact"]
        for artifact in case["artifacts"]
        if len(
            vector := np.frombuffer(base64.b64decode(artifact["vector_b64"]), "<f2").astype("f4")
        )
        == K_DIM
    }


def distances(model: str) -> tuple[list[float], list[float]]:
    """Returns the L2 between any two devices of equal nonces, and of different nonces."""
    same: list[float] = []
    other: list[float] = []
    for one, two in itertools.combinations(
        [artifacts(GOLDEN / f"{name.format(model)}.json") for name in DEVICES], 2
    ):
        for a, b in itertools.product(sorted(one.keys() & two.keys()), repeat=2):
            (same if a == b else other).append(float(np.linalg.norm(one[a] - two[b])))
    return same, other


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    # The same numbers give the same file.
    plt.rcParams.update({"svg.hashsalt": "proofline", "svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(figsize=(8.6, 3.4), layout="constrained")
    edges = np.geomspace(0.001, 2.5, 60)
    measured = [distances(model) for model in MODELS]
    for place, (label, colour) in enumerate(
        [("the same nonce", "#0969da"), ("different nonces", "#cf222e")]
    ):
        values = np.concatenate([pair[place] for pair in measured])
        axes.hist(
            values,
            list(edges),
            weights=np.full(len(values), 100 / len(values)),
            color=colour,
            label=label,
        )
    axes.axvline(0.02, color="#1f2328", linestyle="--", label="dist_threshold 0.02")
    axes.set(xscale="log", xlabel="L2 distance of two artifacts", ylabel="% of pairs")
    axes.set_title(
        "Three tiny models, between CPU in float32, CPU in bfloat16 and H200 in bfloat16",
        fontsize=11,
    )
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
