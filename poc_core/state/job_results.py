"""The text of a job's HTTP answer (protocol.md, section 5), built in parts when the job ends."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from poc_core import records
from poc_core.errors import TooFewValuesError
from poc_core.schemes.contract import contract_of, load_all

_EXCLUDED = b"null"
# Share of a validation's nonces that may stay uncomputed; one always may (protocol.md, section 2).
_MOST_EXCLUDED = 0.1


class Part(NamedTuple):
    """A part of a job's results: nonces as decimal texts, and values as JSON, null if excluded."""

    nonces: Sequence[bytes]
    values: Sequence[bytes]


def answer_texts(
    record: records.JobRecord, parts: Iterable[Part], claimed: Mapping[bytes, bytes]
) -> Iterator[bytes]:
    """Yields the JSON of GET /generate/{id} in pieces: about one piece for each part of the
    results, or a single piece for a validation. `claimed`: nonce -> JSON of the claim.
    TooFewValuesError if no verdict is possible.
    """
    if record.kind is records.JobKind.VALIDATE:
        yield _verdict(record, parts, claimed)
        return
    contract = contract_of(record.spec.scheme)
    text = json.dumps(_head(record)).encode()[:-1] + b', "artifacts": ['
    excluded: list[int] = []
    is_first = True
    for nonces, values in parts:
        pairs = list(zip(nonces, values, strict=True))
        excluded += [int(nonce) for nonce, value in pairs if value == _EXCLUDED]
        if computed := [pair for pair in pairs if pair[1] != _EXCLUDED]:
            artifacts = contract.artifacts_json(*map(list, zip(*computed, strict=True)))
            text += artifacts[1:-1] if is_first else b"," + artifacts[1:-1]
            is_first = False
        yield text
        text = b""
    tail: dict[str, object] = contract.about(record.spec, record.request.terms)
    if excluded:
        tail["excluded_nonces"] = excluded
    yield b"]" + (b", " + json.dumps(tail).encode()[1:] if tail else b"}")


def callback_opening(record: records.JobRecord, answer: bytes) -> bytes:
    """Returns the first piece of a callback's body (protocol.md, section 6), from the first piece
    of the job's answer. The body has the block, key and node instead of the answer's status. All
    later pieces of the answer and of the body are equal.
    """
    opening, rest = answer.split(b", ", 1)
    assert opening.startswith(b'{"status": ')
    about = {
        "block_hash": record.spec.block_hash,
        "block_height": record.request.block_height,
        "public_key": record.spec.public_key,
        "node_id": record.request.node_id,
    }
    return json.dumps(about).encode()[:-1] + b", " + rest


def _verdict(
    record: records.JobRecord, parts: Iterable[Part], claimed: Mapping[bytes, bytes]
) -> bytes:
    nonces: list[bytes] = []
    values: list[bytes] = []
    for part in parts:
        nonces += part.nonces
        values += part.values
    n_excluded = values.count(_EXCLUDED)
    # No verdict without values: the network counts n_total 0 as a vote for fraud.
    if n_excluded > max(1, _MOST_EXCLUDED * len(nonces)) or n_excluded == len(nonces):
        raise TooFewValuesError(
            f"This node could not compute {n_excluded} of {len(nonces)} nonces (its model gave no"
            " finite state), too many for a verdict; ask another node."
        )
    verdict = contract_of(record.spec.scheme).verdict(
        record.spec,
        record.request,
        [int(nonce) for nonce in nonces],
        load_all(values),
        load_all([claimed[nonce] for nonce in nonces]),
    )
    return json.dumps(_head(record) | verdict).encode()


def _head(record: records.JobRecord) -> dict[str, object]:
    return {"status": "completed", "request_id": record.job_id}
