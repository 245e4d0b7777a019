"""Reads the files that `report` compares. A file has a machine's artifacts, its chains (decode
proofs), or the result of validating chains.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cli.terminal import UsageError, read_json
from poc_core.errors import VectorError
from poc_core.schemes.artifact.encoding import decode_vector

# Terms that compared artifacts must have in common, as far as their files contain them.
TERMS = ("block_hash", "public_key", "seq_len", "k_dim", "poc_stronger_rng")

# Points of a chain in the network.
_USUAL_STEPS = 257
# The terms for chains.
CHAIN_TERMS = ("block_hash", "public_key", "seq_len", "max_tokens", "per_nonce_reflection")


@dataclass(frozen=True)
class FiledChains:
    """The decode proofs from a file for one block hash and public key. Each nonce has a chain of
    codebook points.
    """

    terms: Mapping[str, Any]  # those of CHAIN_TERMS that the file has
    points: Mapping[int, Sequence[int]]  # by nonce


@dataclass(frozen=True)
class FiledProof:
    """The artifacts from a file for one block hash and public key."""

    terms: Mapping[str, Any]  # those of TERMS that the file has
    nonces: npt.NDArray[np.int64]  # (n,), ascending, unique
    vectors: npt.NDArray[np.float32]  # (n, k_dim)


@dataclass(frozen=True)
class Machine:
    """The content of one file: a machine's artifacts, its chains, or the margins of its validated
    chains.
    """

    name: str
    path: Path
    proofs: Sequence[FiledProof]
    margins: npt.NDArray[np.float64] | None  # (n,), each nonce's largest margin
    chains: FiledChains | None = None
    n_steps: int = 0  # of validated chains

    @property
    def n(self) -> int:
        return (
            len(self.margins)
            if self.margins is not None
            else sum(len(proof.nonces) for proof in self.proofs)
        )


def read_machines(paths: Sequence[Path]) -> list[Machine]:
    """Reads one machine from each file. A machine is named after its file; if two files have the
    same name, after the full path.

    Raises UsageError if a file is invalid, or is given twice.
    """
    seen: set[str] = set()
    for path in paths:
        if (place := os.path.realpath(path)) in seen:
            raise UsageError(f"{path} is given twice; each file is one machine or one run.")
        seen.add(place)
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(path: Path, name: str) -> Machine:
    document = read_json(path, "give files that `generate` or `compute --json` wrote")
    try:
        margins, n_steps = _margins(document), _n_steps(document)
        chains = _chains(document, path) if margins is None else None
        of_artifacts = margins is None and chains is None
        proofs = [_proof(one, path) for one in _documents(document, path)] if of_artifacts else []
        if of_artifacts and not proofs:
            raise KeyError("artifact")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError):
        raise UsageError(
            f'{path} holds no artifacts; it must be {{"artifacts": [{{"nonce": 0, "vector_b64":'
            ' "..."}, ...]}, for chains with "k_points_steps", or the answer to a validation of'
            ' chains, {"per_nonce": [{"nonce": 0, "mismatch_margin_max": 0.0}, ...]}.'
        ) from None
    return Machine(name, path, proofs, margins, chains, n_steps)


def _documents(document: Any, path: Path) -> list[Any]:
    """Returns the JSON documents in a file of artifacts, one for each block hash and key. Only
    golden files (tests/data) have several.
    """
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
    found = _by_nonce(document, path)
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


def _by_nonce(document: Mapping[str, Any], path: Path) -> dict[int, Mapping[str, Any]]:
    found = {_integer(artifact["nonce"]): artifact for artifact in document["artifacts"]}
    if len(found) < len(document["artifacts"]):
        raise UsageError(
            f"{path} holds a nonce twice; give each machine's runs in files of their own."
        )
    return found


def _chains(document: Any, path: Path) -> FiledChains | None:
    """Returns the chains in a file; None if the file has no chains."""
    if isinstance(document, list):
        document = {"artifacts": document}
    artifacts = document.get("artifacts") if isinstance(document, dict) else None
    if not artifacts or not all(artifact.get("k_points_steps") for artifact in artifacts):
        return None
    points = {
        nonce: [int(point) for point in artifact["k_points_steps"]]
        for nonce, artifact in _by_nonce(document, path).items()
    }
    return FiledChains(_terms(document, CHAIN_TERMS), points)


def _terms(document: Mapping[str, Any], names: Sequence[str] = TERMS) -> dict[str, Any]:
    """Returns the inputs of a document's proof, those of `names` that the document contains.

    Files of `generate` and `compute` have the inputs under "request"; callbacks have them at the
    top level.
    """
    request = document.get("request") or {}
    told = {
        **document,
        **(document.get("encoding") or {}),
        **request,
        **(request.get("params") or {}),
    }
    return {name: told[name] for name in names if told.get(name) is not None}


def _k_dim(vector_b64: str) -> int:
    return (len(vector_b64) * 3 // 4 - vector_b64.count("=")) // 2


def _margins(document: Any) -> npt.NDArray[np.float64] | None:
    """Returns the largest margin of each nonce's chain, float64 (n,); None if the document has no
    margins.

    Documents with margins are answers to validations of chains, and results of `compute` for given
    chains.
    """
    if not isinstance(document, dict):
        return None
    if "per_nonce" in document:
        return np.array([_margin(one["mismatch_margin_max"]) for one in document["per_nonce"]])
    values = [artifact.get("k_points_steps") for artifact in document.get("artifacts") or ()]
    enforced = [
        value
        for value in values
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], float)
    ]
    return (
        np.array([_margin(value[1]) for value in enforced])
        if enforced and len(enforced) == len(values)
        else None
    )


def _n_steps(document: Any) -> int:
    """Returns how many points each validated chain has. Returns the network's number if the
    document does not contain it.
    """
    told = document.get("per_nonce") if isinstance(document, dict) else None
    n_steps = _integer(told[0].get("n_steps", _USUAL_STEPS)) if told else _USUAL_STEPS
    if n_steps < 1:
        raise ValueError
    return n_steps


def _margin(number: Any) -> float:
    if isinstance(number, bool) or not (math.isfinite(number) and number >= 0):
        raise ValueError
    return float(number)


def _integer(number: Any) -> int:
    if type(number) is not int:
        raise TypeError
    return number
