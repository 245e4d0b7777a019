"""A job's HTTP answer (protocol.md, section 5): built in parts and, if large, stored in pieces.

The answer is built once, when the job ends. Without a callback no process holds a large one in
full. No value in Redis nears its limit of 512 MB.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from poc_core.errors import TooFewValuesError
from poc_core.payloads import callback_url
from poc_core.records import JobKind, JobRecord
from poc_core.schemes import contract_of
from poc_core.schemes.contract import load_all
from poc_core.state import keys, scripts
from poc_core.state.client import Store

# Bytes of one piece of a large answer; 50,000 artifacts of k_dim 12 are one piece.
PIECE_BYTES = 4 * 1024 * 1024

# TTL in seconds of pieces that no job has adopted; writing one takes much less.
_STAGING_TTL_S = 120
# Seconds that pieces outlive their job, for a client that is still reading.
_READING_S = 600

_EXCLUDED = b"null"
# Share of a validation's nonces that may stay uncomputed; one always may (protocol.md, section 2).
_MOST_EXCLUDED = 0.1


@dataclass(frozen=True)
class StoredAnswer:
    """An answer stored in Redis."""

    n_bytes: int
    pieces: Iterator[bytes]  # can be read only once
    is_in_pieces: bool


class Part(NamedTuple):
    """Some of a job's nonces as texts, in order, and their values as JSON (null: excluded)."""

    nonces: Sequence[bytes]
    values: Sequence[bytes]


class JobResults(Store):
    """The part of JobStore that writes and reads answers."""

    _finish = scripts.of_store("finish_job")

    def result(self, job_id: str) -> StoredAnswer | None:
        """Returns the answer of a completed job as JSON; None if there is none."""
        body, n_bytes = self._redis.hmget(keys.job(job_id), "result", "result_bytes")
        if body is not None:
            return StoredAnswer(len(body), iter([body]), is_in_pieces=False)
        if n_bytes is None:
            return None
        return StoredAnswer(int(n_bytes), self._pieces(job_id, int(n_bytes)), is_in_pieces=True)

    def _complete(self, record: JobRecord, now: float, lock_s: int) -> bool:
        """Stores the answer of a job whose batches are all done. False if the job had ended.

        The caller must hold the job's lock :finishing, which each part renews.
        """
        key = keys.job(record.job_id)
        draft = f"{key}:draft:{uuid.uuid4().hex}"
        url = callback_url(
            record.request.url, "generated" if record.kind is JobKind.GENERATE else "validated"
        )
        claimed = self._redis.hgetall(key + ":claimed") if record.kind is JobKind.VALIDATE else {}
        verdict = ""
        body: list[bytes] = []  # the callback's body, in memory as one payload
        waiting, n_pieces, n_bytes = b"", 0, 0
        for text in answer_texts(record, self._parts(record, lock_s), claimed):
            if record.kind is JobKind.VALIDATE:  # the answer is one text
                verdict = "fraud" if json.loads(text).get("fraud_detected") else "honest"
            if url:
                body.append(text if body else callback_opening(record, text))
            waiting += text
            n_bytes += len(text)
            while len(waiting) > PIECE_BYTES:
                self._push(draft, waiting[:PIECE_BYTES])
                waiting = waiting[PIECE_BYTES:]
                n_pieces += 1
        if n_pieces:
            self._push(draft, waiting)
            waiting, n_pieces = b"", n_pieces + 1
        ttl_s = self._settings.generate_result_ttl_sec
        callback: list[Any] = [url, b"".join(body), self._settings.callback_retention_sec]
        return bool(
            self._finish(
                [key, draft],
                [waiting, n_pieces, n_bytes, now, ttl_s, ttl_s + _READING_S, *callback, verdict],
            )
        )

    def _parts(self, record: JobRecord, lock_s: int) -> Iterator[Part]:
        """Yields nonces and values in parts of about PIECE_BYTES."""
        key = keys.job(record.job_id)
        per_part = max(
            1, PIECE_BYTES // contract_of(record.spec.scheme).bytes_per_artifact(record.spec)
        )
        step = max(1, per_part * record.n_batches // record.n_total)
        for first in range(0, record.n_batches, step):
            indexes = [b"%d" % index for index in range(first, min(first + step, record.n_batches))]
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.expire(key + ":finishing", lock_s)
                pipe.hmget(key + ":nonces", indexes)
                pipe.hmget(key + ":values", indexes)
                _, batches, texts = pipe.execute()
            if not all(batches) or not all(texts):
                raise JobEndedError
            nonces = [nonce for batch in batches for nonce in _nonces_of(batch)]
            yield Part(nonces, [value for text in texts for value in text.split(b"\n")])

    def _push(self, draft: str, piece: bytes) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(draft, piece)
            pipe.expire(draft, _STAGING_TTL_S)
            pipe.execute()

    def _pieces(self, job_id: str, n_bytes: int) -> Iterator[bytes]:
        """Yields the pieces of an answer. OSError: a piece expired during reading."""
        index = 0
        while n_bytes > 0:
            piece = self._redis.lindex(keys.job(job_id) + ":result", index)
            if piece is None:
                raise OSError(f"the answer of job {job_id} expired while it was sent")
            yield piece
            n_bytes -= len(piece)
            index += 1


class JobEndedError(Exception):
    """The job was cancelled, failed or expired while its answer was built."""


def _nonces_of(batch: bytes) -> list[bytes]:
    """Returns nonces in a batch's JSON list, as texts."""
    return batch[1:-1].replace(b" ", b"").split(b",")


def answer_texts(
    record: JobRecord, parts: Iterable[Part], claimed: Mapping[bytes, bytes]
) -> Iterator[bytes]:
    """Yields the JSON of GET /generate/{id}; artifacts come one text per part, to save memory.

    `claimed`: of a validation, nonce -> JSON of its value. TooFewValuesError: no verdict possible.
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
    """Returns the start of a callback's body (protocol.md, section 6) from the answer's first text.

    The block, key and node replace the status. Later texts of the answer stay unchanged.
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


def _head(record: JobRecord) -> dict[str, object]:
    return {"status": "completed", "request_id": record.job_id}
