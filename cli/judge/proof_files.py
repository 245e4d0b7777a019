"""The files that `report` compares: one machine's artifacts, or a validation of its chains."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cli.terminal import UsageError
from poc_core.arithmetic.encoding import decode_vector
from poc_core.errors import VectorError

# What artifacts must have in common to be compared, where their files say it.
TERMS = ("block_hash", "public_key", "seq_len", "k_dim", "poc_stronger_rng")


@dataclass(frozen=True)
class FiledProof:
    """Artifacts for one block hash and public key."""

    terms: Mapping[str, Any]  # as far as the file has TERMS
    nonces: npt.NDArray[np.int64]  # (n,), ascending, each once
    vectors: npt.NDArray[np.float32]  # (n, k_dim)


@dataclass(frozen=True)
class Machine:
    """A machine's artifacts or margins, as one file holds them."""

    name: str
    path: Path
    proofs: Sequence[FiledProof]
    margins: npt.NDArray[np.float64] | None  # (n,), each nonce's largest

    @property
    def n(self) -> int:
        return (
            len(self.margins)
            if self.margins is not None
            else sum(len(proof.nonces) for proof in self.proofs)
        )


def read_machines(paths: Sequence[Path]) -> list[Machine]:
    """The machines, each named after its file, or its whole path where two files have one name."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UsageError(f"{path} is given twice; each file is one machine or one run.")
        seen.add(path.resolve())
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(path: Path, name: str) -> Machine:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Cannot read {path} ({error}); give files that `generate` or `compute --json` wrote."
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{path} is not JSON ({error}); give files that `generate` or `compute --json` wrote."
        ) from None
    try:
        margins = _margins(document)
        proofs = (
            [] if margins is not None else [_proof(one, path) for one in _documents(document, path)]
        )
        if margins is None and not proofs:
            raise KeyError("artifact")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError):
        raise UsageError(
            f'{path} holds no artifacts; it must be {{"artifacts": [{{"nonce": 0, "vector_b64":'
            ' "..."}, ...]}, or the answer to a validation of chains, {"per_nonce": [{"nonce":'
            ' 0, "mismatch_margin_max": 0.0}, ...]}.'
        ) from None
    return Machine(name, path, proofs, margins)


def _documents(document: Any, path: Path) -> list[Any]:
    """Documents of a file, one per block hash and key; golden files (tests/data) hold several."""
    if isinstance(document, list):
        return [{"artifacts": document}]
    if "dist" in document and "artifacts" not in document:
        raise UsageError(
            f"{path} holds distances of the earlier scheme, which are judged by r_target; see"
            " `proofline calibrate`."
        )
    several: list[Any] = document.get("artifact", [document])
    return several


def _proof(document: Mapping[str, Any], path: Path) -> FiledProof:
    found = {artifact["nonce"]: artifact for artifact in document["artifacts"]}
    if len(found) < len(document["artifacts"]):
        raise UsageError(
            f"{path} holds a nonce twice; give each machine's runs in files of their own."
        )
    if any(artifact.get("k_points_steps") for artifact in found.values()):
        raise UsageError(
            f"{path} holds chains of points. How far chains lie off is known to who recomputed"
            " them: give the answer to a validation of them, which has `per_nonce`."
        )
    if not found:
        raise UsageError(f"{path} holds no nonce.")
    terms = _terms(document)
    nonces = sorted(found)
    k_dim = terms.setdefault("k_dim", _k_dim(found[nonces[0]]["vector_b64"]))
    vectors = []
    for nonce in nonces:
        try:
            vectors.append(decode_vector(found[nonce]["vector_b64"], k_dim))
        except VectorError as error:
            raise UsageError(
                f"{path}, nonce {nonce}: {error} A validator calls it a mismatch; leave it out."
            ) from None
    return FiledProof(terms, np.array(nonces, np.int64), np.stack(vectors))


def _terms(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document's terms: under "request" (`generate`, `compute`) or at the top (callbacks)."""
    request = document.get("request") or {}
    told = {
        **document,
        **(document.get("encoding") or {}),
        **request,
        **(request.get("params") or {}),
    }
    return {name: told[name] for name in TERMS if told.get(name) is not None}


def _k_dim(vector_b64: str) -> int:
    return (len(vector_b64) * 3 // 4 - vector_b64.count("=")) // 2


def _margins(document: Any) -> npt.NDArray[np.float64] | None:
    """Margins in a chain validation's answer, or in `compute` with enforced chains; or None."""
    if not isinstance(document, dict):
        return None
    if "per_nonce" in document:
        return np.array([_finite(one["mismatch_margin_max"]) for one in document["per_nonce"]])
    values = [artifact.get("k_points_steps") for artifact in document.get("artifacts") or ()]
    enforced = [
        value
        for value in values
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], float)
    ]
    return (
        np.array([value[1] for value in enforced])
        if enforced and len(enforced) == len(values)
        else None
    )


def _finite(number: Any) -> float:
    if not math.isfinite(number):
        raise ValueError
    return float(number)
