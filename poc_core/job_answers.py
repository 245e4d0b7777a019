"""The HTTP answer of a completed job (protocol.md, section 5): made once, when the job ends, and sent as it is."""

import json
from collections.abc import Mapping, Sequence

from poc_core.records import JobKind, JobRecord
from poc_core.schemes import contract_of
from poc_core.schemes.contract import load_all

_EXCLUDED = b"null"


def answer_body(
    record: JobRecord, nonces: Sequence[bytes], values: Mapping[bytes, bytes], claimed: Mapping[bytes, bytes]
) -> bytes:
    """The JSON that GET /generate/{id} sends.

    nonces: in their order, as texts; values: nonce -> JSON of its value, null = excluded; claimed, of a validation:
    nonce -> JSON of what its value is said to be.
    """
    head = {"status": "completed", "request_id": record.job_id}
    contract = contract_of(record.spec.scheme)
    if record.kind is JobKind.VALIDATE:
        verdict = contract.verdict(
            record.spec,
            record.request,
            [int(nonce) for nonce in nonces],
            load_all([values[nonce] for nonce in nonces]),
            load_all([claimed[nonce] for nonce in nonces]),
        )
        return json.dumps(head | verdict).encode()
    computed = [nonce for nonce in nonces if values[nonce] != _EXCLUDED]
    artifacts = contract.artifacts_json(computed, [values[nonce] for nonce in computed])
    tail: dict[str, object] = contract.about(record.spec, record.request.terms)
    if len(computed) < len(nonces):
        tail["excluded_nonces"] = [int(nonce) for nonce in nonces if values[nonce] == _EXCLUDED]
    body = json.dumps(head).encode()[:-1] + b', "artifacts": ' + artifacts
    return body + (b", " + json.dumps(tail).encode()[1:] if tail else b"}")


def callback_body(record: JobRecord, answer: bytes) -> bytes:
    """The JSON that the job's url is sent (protocol.md, section 6): the answer without its status, and whose it is."""
    opening, rest = answer.split(b", ", 1)
    assert opening.startswith(b'{"status": ')
    about = {
        "block_hash": record.spec.block_hash,
        "block_height": record.request.block_height,
        "public_key": record.spec.public_key,
        "node_id": record.request.node_id,
    }
    return json.dumps(about).encode()[:-1] + b", " + rest
