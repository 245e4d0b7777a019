"""A job's HTTP answer (protocol.md, section 5): built part by part, kept in pieces where large.

It is made once, when the job ends. Neither the worker nor the API holds all of a large one, and no
value in Redis comes near its limit of 512 MB.
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

# Seconds that pieces live which no job has adopted: each is written well within them.
_STAGING_TTL_S = 120
# Seconds that pieces outlive their job, for a client that began to read at its end.
_READING_S = 600

_EXCLUDED = b"null"
# Share of a validation's nonces that may stay uncomputed, at least one (protocol.md, section 2).
_MOST_EXCLUDED = 0.1


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as Redis holds it."""

    n_bytes: int
    pieces: Iterator[bytes]  # to be read once, one at a time
    is_in_pieces: bool


class Part(NamedTuple):
    """Some of a job's nonces as texts, in order, and the JSON of their values; null: excluded."""

    nonces: Sequence[bytes]
    values: Sequence[bytes]


class JobResults(Store):
    """The part of JobStore that writes and reads answers."""

    _finish = scripts.of_store("finish_job")

    def result(self, job_id: str) -> StoredAnswer | None:
        """The answer of a completed job as JSON, ready to be sent; None when there is none."""
        body, n_bytes = self._redis.hmget(keys.job(job_id), "result", "result_bytes")
        if body is not None:
            return StoredAnswer(len(body), iter([body]), is_in_pieces=False)
        if n_bytes is None:
            return None
        return StoredAnswer(int(n_bytes), self._pieces(job_id, int(n_bytes)), is_in_pieces=True)

    def _complete(self, record: JobRecord, now: float, lock_s: int) -> bool:
        """Builds and stores the answer of a job whose batches are all done. False: it ended before.

        Only for the holder of the job's lock :finishing, which is renewed with each part.
        """
        key = keys.job(record.job_id)
        draft = f"{key}:draft:{uuid.uuid4().hex}"
        url = callback_url(
            record.request.url, "generated" if record.kind is JobKind.GENERATE else "validated"
        )
        claimed = self._redis.hgetall(key + ":claimed") if record.kind is JobKind.VALIDATE else {}
        verdict = ""
        body: list[bytes] = []  # of the callback: one payload, so it is in memory as a whole
        waiting, n_pieces, n_bytes = b"", 0, 0
        for text in answer_texts(record, self._parts(record, lock_s), claimed):
            if record.kind is JobKind.VALIDATE:  # which is one text
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
        """The job's nonces and values, of about PIECE_BYTES at a time."""
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
        """The pieces of an answer, in order. OSError: they expired while they were read."""
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
    """The nonces in the JSON list of a batch, as texts."""
    return batch[1:-1].replace(b" ", b"").split(b",")


def answer_texts(
    record: JobRecord, parts: Iterable[Part], claimed: Mapping[bytes, bytes]
) -> Iterator[bytes]:
    """The JSON that GET /generate/{id} sends, in texts: of artifacts one a part, to save memory.

    `claimed`: of a validation, nonce -> JSON of its value. TooFewValuesError: no verdict on these.
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
    # Of none it would be a verdict too: the network counts n_total 0 as a vote for fraud.
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
