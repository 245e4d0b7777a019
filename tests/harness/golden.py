"""The reference's numbers, and how far an engine may lie from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from poc_core.records import ProofSpec
from poc_core.schemes.artifact.encoding import decode_vector
from workers.engines.base import Engine
from workers.pipeline import compute_all

ROOT = Path(__file__).parents[2]
# Golden numbers that need no model: hashes, floats, vectors.
PRIMITIVES: dict[str, Any] = json.loads((ROOT / "tests/data/golden/primitives.json").read_text())
MODELS = ["tiny-qwen3", "tiny-llama", "tiny-qwen3-moe"]
# A router undecided between two experts may choose the other one in other arithmetic.
AGREEING_FRACTION = {"tiny-qwen3": 1.0, "tiny-llama": 1.0, "tiny-qwen3-moe": 0.95}


def model_dir(model: str) -> str:
    return str(ROOT / "models" / model)


def cases(
    model: str, kind: str, source: str = "cpu", dtype: str = "float32"
) -> list[dict[str, Any]]:
    """The golden cases of `kind` ("artifact" or "distance")."""
    found: list[dict[str, Any]] = json.loads(
        (ROOT / f"tests/data/golden/{source}-{model}-{dtype}.json").read_text()
    )[kind]
    assert found
    return found


def artifact_spec(case: dict[str, Any]) -> ProofSpec:
    return ProofSpec(
        block_hash=case["block_hash"],
        public_key=case["public_key"],
        seq_len=case["seq_len"],
        options={"k_dim": case["k_dim"], "stronger_rng": case["poc_stronger_rng"]},
    )


def distance_spec(case: dict[str, Any]) -> ProofSpec:
    return ProofSpec(
        scheme="distance",
        block_hash=case["block_hash"],
        public_key=case["public_key"],
        seq_len=case["seq_len"],
        options={"randomization": case["randomization"]},
    )


def l2(ours: list[Any], theirs: list[Any], k_dim: int) -> np.ndarray:
    """The L2 distance of each pair of vector_b64: float64 (n,)."""
    vectors = [np.array([decode_vector(text, k_dim) for text in texts]) for texts in (ours, theirs)]
    distances: np.ndarray = np.linalg.norm(vectors[0] - vectors[1], axis=-1)
    return distances


def artifact_errors(engine: Engine, found: list[dict[str, Any]]) -> list[np.ndarray]:
    """Per case, how far the engine's artifacts lie from the reference's: (n,)."""
    errors = []
    for case in found:
        values = compute_all(
            engine, artifact_spec(case), [artifact["nonce"] for artifact in case["artifacts"]]
        )
        errors.append(
            l2(values, [artifact["vector_b64"] for artifact in case["artifacts"]], case["k_dim"])
        )
    return errors


def distance_errors(engine: Engine, found: list[dict[str, Any]]) -> np.ndarray:
    """How far the engine's distances lie from the reference's, over all cases: (n,)."""
    return np.concatenate(
        [
            np.abs(
                np.array(compute_all(engine, distance_spec(case), case["nonces"]), float)
                - case["dist"]
            )
            for case in found
        ]
    )
