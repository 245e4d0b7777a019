"""A job's answer in Redis: built part by part, and kept in pieces where it is large.

So neither the worker nor the API holds all of a large answer, and no value in Redis comes near its
limit of 512 MB.
"""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redis import Redis

from poc_core.job_answers import Part, answer_texts, callback_opening
from poc_core.payloads import callback_url
from poc_core.records import JobKind, JobRecord
from poc_core.schemes import contract_of
from poc_core.settings import Settings
from poc_core.state import keys, scripts

# Bytes of one piece of a large answer; 50,000 artifacts of k_dim 12 are one piece.
PIECE_BYTES = 4 * 1024 * 1024

# Values read in one call of a script: a few milliseconds of Redis' time.
_READ_CHUNK = 4000

# Seconds that pieces live which no job has adopted: each is written well within them.
_STAGING_TTL_S = 120
# Seconds that pieces outlive their job, for a client that began to read at its end.
_READING_S = 600


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as Redis holds it."""

    n_bytes: int
    pieces: Iterator[bytes]  # to be read once, one at a time
    is_in_pieces: bool


class JobResults:
    """Writes and reads the answers of jobs."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._settings = settings
        self._batch_values = scripts.load(redis, "batch_values")
        self._finish = scripts.load(redis, "finish_job")

    def read(self, job_id: str) -> StoredAnswer | None:
        """The answer of a completed job as JSON; None when there is none."""
        body, n_bytes = self._redis.hmget(keys.job(job_id), "result", "result_bytes")
        if body is not None:
            return StoredAnswer(len(body), iter([body]), is_in_pieces=False)
        if n_bytes is None:
            return None
        return StoredAnswer(int(n_bytes), self._pieces(job_id, int(n_bytes)), is_in_pieces=True)

    def complete(self, record: JobRecord, now: float, lock_s: int) -> bool:
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
                verdict = "fraud" if json.loads(text)["fraud_detected"] else "honest"
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
        call = max(1, min(per_part, _READ_CHUNK) * record.n_batches // record.n_total)
        for first in range(0, record.n_batches, step):
            indexes = [b"%d" % index for index in range(first, min(first + step, record.n_batches))]
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.expire(key + ":finishing", lock_s)
                pipe.hmget(key + ":nonces", indexes)
                for begin in range(0, len(indexes), call):
                    self._batch_values([key], indexes[begin : begin + call], client=pipe)
                _, batches, *chunks = pipe.execute()
            texts = [text for chunk in chunks for text in chunk]
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
