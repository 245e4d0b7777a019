"""A job's HTTP answer (protocol.md, section 5): built in parts and, if large, stored in pieces.

The answer is built once, when the job ends. Without a callback, no process holds a large answer in
full. Pieces keep every value in Redis far below Redis' limit of 512 MB.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from poc_core.callbacks import callback_url
from poc_core.errors import TooFewValuesError
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
    """The answer of a completed job. `pieces` yields its bytes, and can be read only once."""

    n_bytes: int
    pieces: Iterator[bytes]
    is_in_pieces: bool


class Part(NamedTuple):
    """A part of a job's results: nonces as decimal texts, and the value of each nonce as JSON.

    The value of an excluded nonce is null.
    """

    nonces: Sequence[bytes]
    values: Sequence[bytes]


class JobResults(Store):
    """The base class of JobStore that stores and reads jobs' answers."""

    _finish = scripts.of_store("finish_job")

    def result(self, job_id: str) -> StoredAnswer | None:
        """Returns the answer of a completed job as JSON. Returns None for any other job."""
        body, n_bytes = self._redis.hmget(keys.job(job_id), "result", "result_bytes")
        if body is not None:
            return StoredAnswer(len(body), iter([body]), is_in_pieces=False)
        if n_bytes is None:
            return None
        return StoredAnswer(int(n_bytes), self._pieces(job_id, int(n_bytes)), is_in_pieces=True)

    def _complete(self, record: JobRecord, now: float, lock_s: int) -> bool:
        """Builds and stores the answer of a job whose batches are all done.

        Returns False if the job has already ended. The caller must hold the job's lock :finishing,
        which each part extends to `lock_s` seconds.
        """
        key, is_validation = keys.job(record.job_id), record.kind is JobKind.VALIDATE
        draft = f"{key}:draft:{uuid.uuid4().hex}"
        url = callback_url(record.request.url, "validated" if is_validation else "generated")
        claimed = self._redis.hgetall(key + ":claimed") if is_validation else {}
        verdict = ""
        body: list[bytes] = []  # the callback's body, in memory as one payload
        waiting, n_pieces, n_bytes = b"", 0, 0
        for text in answer_texts(record, self._parts(record, lock_s), claimed):
            if is_validation:  # the answer is one text
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
        args: list[Any] = [waiting, n_pieces, n_bytes, now, ttl_s, ttl_s + _READING_S]
        args += [url, b"".join(body), self._settings.callback_retention_sec, verdict]
        return bool(self._finish([key, draft], args))

    def _parts(self, record: JobRecord, lock_s: int) -> Iterator[Part]:
        """Yields a job's nonces and values in parts of about PIECE_BYTES.

        JobEndedError if Redis lacks some of the nonces or values.
        """
        key, n_batches = keys.job(record.job_id), record.n_batches
        each = contract_of(record.spec.scheme).bytes_per_artifact(record.spec)
        step = max(1, max(1, PIECE_BYTES // each) * n_batches // record.n_total)
        for first in range(0, n_batches, step):
            indexes = [b"%d" % index for index in range(first, min(first + step, n_batches))]
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
        """Yields the pieces of an answer. OSError if a piece has expired."""
        index = 0
        while n_bytes > 0:
            piece = self._redis.lindex(keys.job(job_id) + ":result", index)
            if piece is None:
                raise OSError(f"the answer of job {job_id} expired while it was sent")
            yield piece
            n_bytes -= len(piece)
            index += 1


class JobEndedError(Exception):
    """The job ended or expired while its answer was built."""


def _nonces_of(batch: bytes) -> list[bytes]:
    """Returns the nonces of a batch's JSON list, as texts."""
    return batch[1:-1].replace(b" ", b"").split(b",")


def answer_texts(
    record: JobRecord, parts: Iterable[Part], claimed: Mapping[bytes, bytes]
) -> Iterator[bytes]:
    """Yields the JSON of GET /generate/{id} as consecutive texts, about one for each part.

    A validation's answer is a single text. `claimed`: a validation's claims, nonce -> JSON of the
    value. TooFewValuesError if no verdict is possible.
    """
    if record.kind is JobKind.VALIDATE:
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


def callback_opening(record: JobRecord, answer: bytes) -> bytes:
    """Returns the first text of a callback's body (protocol.md, section 6).

    `answer`: the first text of the job's answer. In the callback, the block, key and node replace
    the status. All further texts of the answer and of the callback are the same.
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
