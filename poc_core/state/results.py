"""The answer of a completed job (protocol.md, section 5), from the job's hashes as Redis holds them."""

import json
from collections.abc import Mapping
from dataclasses import asdict

from poc_core.records import JobKind, JobRecord, JobRequest, ProofSpec

_EXCLUDED = b"null"


def answer_body(
    record: JobRecord,
    batches: Mapping[bytes, bytes],
    values: Mapping[bytes, bytes],
    claimed: Mapping[bytes, bytes],
) -> bytes:
    """The JSON that GET /generate/{id} sends.

    batches: batch index -> JSON list of nonces; values: nonce -> JSON value, null = excluded; claimed: nonce
    -> vector_b64 or distance.
    """
    nonces = [nonce for index in range(record.n_batches) for nonce in nonces_of(batches[b"%d" % index])]
    excluded = [int(nonce) for nonce in nonces if values[nonce] == _EXCLUDED]
    head = {"status": "completed", "request_id": record.job_id}
    if record.spec.scheme == "distance":
        return json.dumps({**head, "status": "OK", **_validated_batch(record, nonces, values, claimed)}).encode()
    if record.kind is JobKind.VALIDATE:
        return json.dumps({**head, **_verdict(record, nonces, values, claimed)}).encode()

    # Joined, not parsed: 100,000 vectors pass through as the text they are.
    computed = [(nonce, values[nonce]) for nonce in nonces if values[nonce] != _EXCLUDED]
    artifacts = b",".join(b'{"nonce":%s,"vector_b64":%s}' % pair for pair in computed)
    tail: dict[str, object] = {"encoding": {"dtype": "f16", "k_dim": _k_dim(record), "endian": "le"}}
    if excluded:
        tail["excluded_nonces"] = excluded
    opening, closing = json.dumps(head).encode()[:-1], json.dumps(tail).encode()[1:]
    return opening + b', "artifacts": [' + artifacts + b"], " + closing


def nonces_of(batch: bytes) -> list[bytes]:
    """The nonces in the JSON list of a batch, as texts."""
    return batch[1:-1].replace(b" ", b"").split(b",")


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


def _verdict(
    record: JobRecord, nonces: list[bytes], values: Mapping[bytes, bytes], claimed: Mapping[bytes, bytes]
) -> dict[str, object]:
    from poc_core.validation import compare  # here: numpy takes 25 MB, and the API never judges

    test = record.request.stat_test
    verdict = compare(
        computed={int(nonce): json.loads(values[nonce]) for nonce in nonces},
        received={int(nonce): vector.decode() for nonce, vector in claimed.items()},
        k_dim=_k_dim(record),
        dist_threshold=test.dist_threshold,
        p_mismatch=test.p_mismatch,
        fraud_threshold=test.fraud_threshold,
    )
    return asdict(verdict)


def _validated_batch(
    record: JobRecord, nonces: list[bytes], values: Mapping[bytes, bytes], claimed: Mapping[bytes, bytes]
) -> dict[str, object]:
    """The ValidatedBatch of a batch of distances (protocol.md, section 3)."""
    computed = [json.loads(values[nonce]) for nonce in nonces]
    received = [float(claimed[nonce]) for nonce in nonces]
    return validated_batch(record.spec, record.request, [int(nonce) for nonce in nonces], received, computed)


def validated_batch(
    spec: ProofSpec,
    request: JobRequest,
    nonces: list[int],
    received: list[float],
    computed: list[float | None],
) -> dict[str, object]:
    """Somebody's distances judged: the batch as it was recomputed, and the verdict. None: not computable here."""
    from poc_core.validation import judge_distances  # here: numpy takes 25 MB

    assert request.r_target is not None
    verdict = judge_distances(received, computed, request.r_target, request.stat_test.fraud_threshold)
    return {
        "fraud_detected": verdict.fraud_detected,
        "computed_distances": computed,
        "public_key": spec.public_key,
        "block_hash": spec.block_hash,
        "block_height": request.block_height,
        "nonces": nonces,
        "dist": computed,
        "node_id": request.node_id,
        "received_dist": received,
        "r_target": request.r_target,
        "fraud_threshold": request.stat_test.fraud_threshold,
        "n_invalid": verdict.n_invalid,
        "probability_honest": verdict.probability_honest,
        "n_excluded": computed.count(None),
        "seq_len": spec.seq_len,
    }


def _k_dim(record: JobRecord) -> int:
    return int(str(record.spec.options["k_dim"]))
