"""The HTTP answer of a completed job (protocol.md, section 5), made once when the job ends."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from poc_core.errors import NoVerdictError
from poc_core.records import JobKind, JobRecord
from poc_core.schemes import contract_of
from poc_core.schemes.contract import load_all

_EXCLUDED = b"null"
# Share of a validation's nonces that may stay uncomputed, at least one (protocol.md, section 2).
_MOST_EXCLUDED = 0.1


class Part(NamedTuple):
    """Some of a job's nonces as texts, in order, and the JSON of their values; null: excluded."""

    nonces: Sequence[bytes]
    values: Sequence[bytes]


def answer_texts(
    record: JobRecord, parts: Iterable[Part], claimed: Mapping[bytes, bytes]
) -> Iterator[bytes]:
    """The JSON that GET /generate/{id} sends, in texts: of artifacts one a part, to save memory.

    `claimed`, of a validation: nonce -> JSON of its claimed value. NoVerdictError: too few values.
    """
    if record.kind is JobKind.VALIDATE:
        yield _verdict(record, parts, claimed)
        return
    contract = contract_of(record.spec.scheme)
    text = json.dumps(_head(record)).encode()[:-1] + b', "artifacts": ['
    excluded: list[int] = []
    is_first = True
    for nonces, values in parts:
        computed = [pair for pair in zip(nonces, values, strict=True) if pair[1] != _EXCLUDED]
        excluded += [
            int(nonce) for nonce, value in zip(nonces, values, strict=True) if value == _EXCLUDED
        ]
        if computed:
            artifacts = contract.artifacts_json(
                [nonce for nonce, _ in computed], [value for _, value in computed]
            )
            text += artifacts[1:-1] if is_first else b"," + artifacts[1:-1]
            is_first = False
        yield text
        text = b""
    tail: dict[str, object] = contract.about(record.spec, record.request.terms)
    if excluded:
        tail["excluded_nonces"] = excluded
    yield b"]" + (b", " + json.dumps(tail).encode()[1:] if tail else b"}")


def callback_opening(record: JobRecord, answer: bytes) -> bytes:
    """How the body for a job's url begins (protocol.md, section 6), from the answer's first text.

    Without its status, and with whose answer it is; the texts that follow stay as they are.
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


def _verdict(record: JobRecord, parts: Iterable[Part], claimed: Mapping[bytes, bytes]) -> bytes:
    nonces: list[bytes] = []
    values: list[bytes] = []
    for part in parts:
        nonces += part.nonces
        values += part.values
    n_excluded = values.count(_EXCLUDED)
    if n_excluded > max(1, _MOST_EXCLUDED * len(nonces)):
        raise NoVerdictError(
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


def _head(record: JobRecord) -> dict[str, object]:
    return {"status": "completed", "request_id": record.job_id}
