"""Compares the proofs of machines, as read by `report`: how far two machines' results for the same
nonce lie apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cli.terminal import UsageError
from lab.judge.power import Sample
from lab.judge.proof_files import TERMS, FiledChains, FiledProof, Machine
from poc_core.schemes.decode.codebook_file import DIM, POINTS, read_codebook_file

# Least number of nonces that two machines must share: with fewer, a share of a seventh beyond any
# threshold may remain undetected.
LEAST_NONCES = 20
# Terms that must match a cheat's file, because a cheat may change the others.
TAMPERED_TERMS = ("block_hash", "public_key", "k_dim")


@dataclass(frozen=True)
class Comparisons:
    """The measured distances or margins, as one sample per comparison, and notes for the report.

    `means`: mean distance of each pair of machines, float64 (n, n), NaN for a pair without common
    nonces. Empty if margins of chains were measured.
    """

    names: Sequence[str]  # of the machines, honest ones first
    honest: Sequence[Sample]
    tampered: Sequence[Sample]
    means: npt.NDArray[np.float64]
    notes: list[str] = field(default_factory=list)
    unit: str = "L2 distance"


def compare(honest: Sequence[Machine], tampered: Sequence[Machine]) -> Comparisons:
    """Measures the distances of each pair of machines, or the margins of each machine's validated
    chains.

    Raises UsageError if the machines' inputs differ, or if there are too few files or common
    nonces.
    """
    machines = [*honest, *tampered]
    if chained := next((machine for machine in machines if machine.chains is not None), None):
        raise UsageError(
            f"{chained.path} holds chains of points. Two or more honest files show how often"
            " chains differ. For a cheat's margins give the answer to a validation of its chains,"
            " which has `per_nonce`."
        )
    of_margins = [machine for machine in machines if machine.margins is not None]
    if len(of_margins) not in (0, len(machines)):
        other = next(machine for machine in machines if machine.margins is None)
        raise UsageError(
            f"{of_margins[0].path} holds margins of chains, {other.path} artifacts; compare one or"
            " the other."
        )
    return _of_margins(honest, tampered) if of_margins else _of_artifacts(honest, tampered)


def _of_artifacts(honest: Sequence[Machine], tampered: Sequence[Machine]) -> Comparisons:
    if len(honest) < 2:
        raise UsageError(
            "Give at least two files of honest machines: the report compares their distances."
        )
    machines = [*honest, *tampered]
    means = np.full((len(machines), len(machines)), np.nan)
    np.fill_diagonal(means, 0.0)
    samples: dict[bool, list[Sample]] = {True: [], False: []}  # by whether both are honest
    for column, one in enumerate(machines):
        for row, other in enumerate(machines[column + 1 :], column + 1):
            both_tampered = column >= len(honest)
            try:
                offsets = distances(one, other, TERMS if row < len(honest) else TAMPERED_TERMS)
            except UsageError:
                if both_tampered:  # two cheats need not have common terms
                    continue
                raise
            means[row, column] = means[column, row] = offsets.mean()
            if not both_tampered:
                samples[row < len(honest)].append(
                    Sample(f"{one.name}, {other.name}", np.sort(offsets))
                )
    notes = []
    if not tampered:
        samples[False] = [invented(honest[0], honest[1])]
        notes.append(
            "No --tampered file: the cheat here sends invented vectors, which any threshold finds."
            " These files do not show a cheat with a smaller or quantized model."
        )
    if all(sample.offsets[-1] == 0 for sample in samples[True]):
        notes.append(
            "All honest artifacts are equal: compare machines or number formats that compute"
            " differently."
        )
    return Comparisons(
        [machine.name for machine in machines], samples[True], samples[False], means, notes
    )


def _of_margins(honest: Sequence[Machine], tampered: Sequence[Machine]) -> Comparisons:
    if not honest:
        raise UsageError(
            "Give answers to validations of honest chains, and with --tampered those of others."
        )
    for machine in (*honest, *tampered):
        check_count(machine.n, f"{machine.path} judges")
    samples = {
        machine.name: Sample(machine.name, np.sort(machine.margins))
        for machine in (*honest, *tampered)
        if machine.margins is not None
    }
    cheats = [samples[machine.name] for machine in tampered]
    notes = []
    if not cheats:
        n, n_steps = max((machine.n, machine.n_steps) for machine in honest)
        cheats = [Sample("invented", np.sort(invented_margins(n, n_steps)))]
        notes.append(
            "No --tampered file: the cheat here sends invented chains of points. These files do not"
            " show a cheat with a smaller or quantized model."
        )
    return Comparisons(
        list(samples),
        [samples[machine.name] for machine in honest],
        cheats,
        means=np.empty((0, 0)),
        notes=notes,
        unit="margin",
    )


def invented_margins(n: int, n_steps: int) -> npt.NDArray[np.float64]:
    """Returns the largest margin of each of n chains, float64 (n,), for a cheat that claims random
    codebook points.

    Simulated with random hidden states. `n_steps`: number of points of a chain.
    """
    chance = np.random.default_rng(0)
    codebook = np.frombuffer(read_codebook_file()[0], "<f4").reshape(POINTS, DIM)
    largest = np.zeros(n)
    for _ in range(n_steps):
        q = chance.normal(size=(n, DIM))
        scores = q / np.linalg.norm(q, axis=1, keepdims=True) @ codebook.T
        claimed = scores[np.arange(n), chance.integers(POINTS, size=n)]
        largest = np.maximum(largest, scores.max(axis=1) - claimed)
    return largest


def distances(one: Machine, other: Machine, terms: Sequence[str]) -> npt.NDArray[np.float64]:
    """Returns the L2 distance between two machines' artifacts for each nonce that both computed,
    float64 (n,).

    `terms`: names of the inputs that must be equal. Raises UsageError if they differ, or if there
    are too few common nonces.
    """
    found = []
    for proof in one.proofs:
        match = _match(proof, other, terms)
        if match is not None:
            _, own, others = np.intersect1d(
                proof.nonces, match.nonces, assume_unique=True, return_indices=True
            )
            apart = np.linalg.norm(proof.vectors[own] - match.vectors[others], axis=1)
            found.append(apart.astype(np.float64))
    if not found:
        check_same(one, one.proofs[0], other, other.proofs[0], terms)
    offsets: npt.NDArray[np.float64] = np.concatenate(found)
    check_count(len(offsets), f"{one.path} and {other.path} have in common")
    return offsets


def invented(one: Machine, other: Machine) -> Sample:
    """Returns the distances between an honest machine and a cheat that sends invented vectors.

    The cheat is simulated: each nonce gets the vector of another nonce, which lies as far away as
    an invented one.
    """
    moved = [
        FiledProof(proof.terms, proof.nonces, np.roll(proof.vectors, 1, axis=0))
        for proof in other.proofs
    ]
    return Sample(
        "invented", np.sort(distances(one, Machine("invented", other.path, moved, None), TERMS))
    )


def check_count(n: int, beginning: str) -> None:
    if n < LEAST_NONCES:
        raise UsageError(
            f"{beginning} {n} nonces; a report takes {LEAST_NONCES} or more, better some hundred."
        )


def _match(proof: FiledProof, other: Machine, terms: Sequence[str]) -> FiledProof | None:
    """Returns the other machine's proof whose inputs (`terms`) equal those of `proof`; None if
    there is none.

    If several match, all inputs in TERMS must be equal. Raises UsageError if several match even
    then.
    """
    same = [theirs for theirs in other.proofs if difference(proof, theirs, terms) is None]
    if len(same) > 1:
        same = [theirs for theirs in same if difference(proof, theirs, TERMS) is None]
    if len(same) > 1:
        raise UsageError(
            f"{other.path} holds several proofs, and the file it is compared with does not say for"
            " which block hash it was made; compute it again, or note it under `request`."
        )
    return same[0] if same else None


def check_same(
    one: Machine,
    proof: FiledProof | FiledChains,
    other: Machine,
    others: FiledProof | FiledChains,
    terms: Sequence[str],
) -> None:
    """Raises UsageError if the proofs of two machines differ in one of the inputs `terms`.

    `proof` belongs to the machine `one`, `others` to the machine `other`.
    """
    if (apart := difference(proof, others, terms)) is not None:
        name, mine, theirs = apart
        raise UsageError(
            f"{one.path} and {other.path} do not belong together: {name} is {mine!r} in one,"
            f" {theirs!r} in the other."
        )


def difference(
    one: FiledProof | FiledChains, other: FiledProof | FiledChains, terms: Sequence[str]
) -> tuple[str, object, object] | None:
    """Returns the first input in which two proofs differ: its name and both values. Returns None if
    they do not differ.

    `terms`: names of the inputs to compare. An input that only one file contains is no difference.
    """
    for name in terms:
        if name in one.terms and name in other.terms and one.terms[name] != other.terms[name]:
            return name, one.terms[name], other.terms[name]
    return None
