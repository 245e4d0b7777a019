"""Jobs in Redis. The API creates a job, workers compute its batches, and one worker finishes it.

Redis holds the work. A Celery message only announces work, and may come twice, late or never.
Workers lease batches of the first job in their model's line, a queue in Redis (state/work.py).
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from pydantic import TypeAdapter
from redis.exceptions import ConnectionError

from poc_core import callbacks, errors, queues, records
from poc_core.schemes.contract import contract_of
from poc_core.state import keys, scripts
from poc_core.state.client import Store
from poc_core.state.job_results import Part, answer_texts, callback_opening

# Attempts to build a job's answer, and seconds without progress after which an attempt fails.
MAX_FINISHES = 5
_FINISH_LOCK_S = 20

# TTL in seconds of uploaded nonces whose job is not created yet. 100,000 nonces take 1 s.
_STAGING_TTL_S = 120

# Hash fields per upload command: Redis must serve other clients between two commands.
_UPLOAD_CHUNK = 2000

# Jobs cancelled or counted per script call: about 5 ms, so that Redis also serves other clients.
_CHUNK = 500

# Bytes of one piece of a large answer; 50,000 artifacts of k_dim 12 are one piece.
PIECE_BYTES = 4 * 1024 * 1024

# TTL in seconds of pieces that no job has adopted; writing a piece takes much less time.
_PIECES_TTL_S = 120
# Seconds that pieces outlive their job, for a client that is still reading.
_READING_S = 600

# The fields of a job's hash that make a JobRecord; the result may take megabytes.
_RECORD_FIELDS = [field.name for field in fields(records.JobRecord) if field.name != "job_id"]
_RECORD = TypeAdapter(records.JobRecord)


@dataclass(frozen=True)
class StoredAnswer:
    """The answer of a completed job. `pieces` yields its bytes, and can be read only once."""

    n_bytes: int
    pieces: Iterator[bytes]
    is_in_pieces: bool


@dataclass(frozen=True)
class ActiveJobs:
    """The numbers of active jobs, which are queued or running."""

    queued: int
    running: int
    waiting_for_chat: int  # queued and running jobs


class JobEndedError(Exception):
    """The job ended or expired while its answer was built, or Redis lost values."""


class JobStore(Store):
    """The store of jobs. Each operation is atomic in Redis and safe to repeat."""

    _create = scripts.of_store("create_job")
    _note_waiting = scripts.of_store("note_waiting")
    _finish = scripts.of_store("finish_job")
    _begin_finish = scripts.of_store("begin_finish")
    _end = scripts.of_store("end_job")
    _cancel = scripts.of_store("cancel_queued")
    _recount = scripts.of_store("recount")
    _count = scripts.of_store("count_jobs")

    # Clients: create, read, end.

    def create(self, job: records.NewJob) -> str:
        """Stores a job as queued, and returns its id. QueueFullError if too many nonces, jobs or
        callbacks would wait. AnswerTooLargeError if the answer would be too large.
        """
        self._check_answer(job)
        # Also checked before the upload, which may take megabytes.
        self._check_room(len(job.nonces), self.queued_nonces())
        job_id = uuid.uuid4().hex
        key = keys.job(job_id)
        self._stage(key, job)
        now = self._clock()
        fields: dict[str, Any] = {
            "status": records.JobStatus.QUEUED.value,
            "kind": job.kind.value,
            "model": job.model,
            "spec": job.spec.model_dump_json(),
            "request": job.request.model_dump_json(),
            "n_total": len(job.nonces),
            "n_done": 0,
            "n_batches": job.n_batches,
            "inline": int(job.inline),
            "created_at": now,
        }
        settings, url = self._settings, job.request.url
        args: list[Any] = [job_id, job.model, len(job.nonces), job.n_batches]
        args += [settings.max_queued_nonces, settings.max_jobs]
        args += [settings.max_callbacks if url else "", settings.outbox_max_bytes]
        args += [callbacks.receiver_of(url or ""), job.client, now, settings.job_ttl_sec]
        args.append(len(job.claimed or {}))
        args += [part for item in fields.items() for part in item]
        what, *found = self._create([key], args)
        if what == b"gone":
            raise ConnectionError("Redis has lost the job's nonces; send the request again")
        if what == b"nonces":
            self._check_room(len(job.nonces), found[0])
        if what == b"jobs":
            raise errors.QueueFullError(
                f"{found[0]} jobs have not ended, the most allowed (a fifth of"
                " POC_MAX_QUEUED_NONCES); wait for some to end, and send more nonces in one"
                " request."
            )
        if what == b"callbacks":
            most = f"{settings.max_callbacks} jobs or {settings.outbox_max_bytes} bytes of them"
            most += " (POC_OUTBOX_MAX_BYTES)"
            raise errors.QueueFullError(
                {
                    b"all": f"The callbacks of {most} wait for their receivers already",
                    b"client": "Your callbacks that wait for their receivers are a quarter of"
                    f" {most}, as many as one client may have",
                    b"receiver": "The callbacks that wait for this receiver are a quarter of"
                    f" {most}, as many as one receiver may have",
                }[found[0]]
                + "; try again later, or leave out the url and poll."
            )
        return job_id

    def read(self, job_id: str) -> records.JobRecord | None:
        """Returns a job's record; None if the job is unknown or has expired."""
        return self.read_all([job_id])[0]

    def read_all(self, job_ids: Sequence[str]) -> list[records.JobRecord | None]:
        """Reads the records of several jobs in one request; None for unknown or expired jobs."""
        with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(keys.job(job_id), _RECORD_FIELDS)
            return [_record(*found) for found in zip(job_ids, pipe.execute(), strict=True)]

    def result(self, job_id: str) -> StoredAnswer | None:
        """Returns the answer of a completed job as JSON. Returns None for any other job."""
        body, n_bytes = self._redis.hmget(keys.job(job_id), "result", "result_bytes")
        if body is not None:
            return StoredAnswer(len(body), iter([body]), is_in_pieces=False)
        if n_bytes is None:
            return None
        return StoredAnswer(int(n_bytes), self._pieces(job_id, int(n_bytes)), is_in_pieces=True)

    def cancel(self, job_id: str) -> bool:
        """Cancels a queued or running job. Returns False if the job had already ended."""
        return self._end_job(job_id, records.JobStatus.CANCELLED, "")

    def cancel_queued(self) -> int:
        """Cancels jobs that have not started and whose client does not wait. Returns the number of
        cancelled jobs. Deletes the Celery messages of these jobs' models, because workers also find
        jobs without messages.
        """
        n_cancelled = 0
        for model in self._models():
            rank, n_here = self._redis.zcard(keys.active(model)), 0
            # The newest first, because a job that ends meanwhile lowers the ranks of newer jobs.
            while rank > 0:
                first = max(0, rank - _CHUNK)
                args: list[float] = [first, rank - first, self._clock(), self._ended_ttl_s]
                n_here += self._cancel([keys.active(model)], args)
                rank = first
            if n_here:
                self._redis.unlink(queues.messages(queues.model_queue(model)))
            n_cancelled += n_here
        return n_cancelled

    def cancel_all(self) -> None:
        """Cancels every queued or running job, because the engines stop."""
        self.cancel_queued()
        for model in self._models():
            for job_id in self.active_jobs(model):
                self.cancel(job_id)

    def queued_nonces(self) -> int:
        """Returns the number of nonces that are accepted but not computed yet."""
        return max(0, int(self._redis.get(keys.QUEUED_NONCES) or 0))

    def count_active(self) -> ActiveJobs:
        """Counts the queued and running jobs of all models."""
        sums = [0, 0, 0]
        for model in self._models():
            first, n_seen = 0, _CHUNK
            while n_seen == _CHUNK:
                n_seen, *counts = self._count([keys.active(model)], [first, _CHUNK])
                first += n_seen
                sums = [one + more for one, more in zip(sums, counts, strict=True)]
        return ActiveJobs(*sums)

    def newest(self, most: int, most_old: int) -> list[str]:
        """Returns ids of jobs: first the `most` newest jobs (at most 100), the newest first, then
        the `most_old` oldest active jobs of each model.
        """
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.lrange(keys.NEWEST_JOBS, 0, most - 1)
            for model in self._models():
                pipe.zrange(keys.active(model), 0, most_old - 1)
            newest, *old = pipe.execute()
        found = [*newest, *(job_id for ids in old for job_id in reversed(ids))]
        return [job_id.decode() for job_id in dict.fromkeys(found)]

    def total_processed(self) -> int:
        """Returns the number of nonces that workers computed. Redis deletes this count if no nonce
        is computed for job_ttl_sec seconds.
        """
        return int(self._redis.get(keys.STATS_TOTAL) or 0)

    def verdicts(self) -> dict[str, int]:
        """Returns the number of validations for each verdict ("honest", "fraud"). Redis deletes
        these counts after 30 days without a validation.
        """
        return self._by_verdict(keys.VERDICTS)

    def validations(self, at: float) -> dict[str, int]:
        """Returns the number of validations for each verdict, on the UTC day of the time `at`."""
        return self._by_verdict(keys.validations(int(at // 86_400)))

    def _by_verdict(self, name: str) -> dict[str, int]:
        found = self._redis.hgetall(name)
        counts = {name.decode(): int(n) for name, n in found.items()}
        return {name: counts.get(name, 0) for name in ("honest", "fraud")}

    # Workers, see also state/work.py.

    def next_in_line(self, model: str) -> str | None:
        """Returns the id of the job whose batches are leased next; None if no job waits."""
        found = self._redis.zrange(keys.line(model), 0, 0)
        return found[0].decode() if found else None

    def note_waiting(self, job_ids: Sequence[str], what: str) -> bool:
        """Stores what the jobs wait for: "chat", or "" if they continue. Returns False if no job
        can be computed now, because all have ended or a round uses the workers.
        """
        names = [keys.job(job_id) for job_id in job_ids]
        return bool(self._note_waiting(names, [what, self._settings.job_ttl_sec]))

    def finish(self, job_id: str) -> bool:
        """Builds and stores the answer of a job whose batches are all done. Returns True if this
        call stored the answer. The job fails after MAX_FINISHES unsuccessful attempts.
        """
        limits = [_FINISH_LOCK_S, MAX_FINISHES, self._clock(), self._ended_ttl_s]
        if not self._begin_finish([keys.job(job_id)], [uuid.uuid4().hex, *limits]):
            return False
        record = self.read(job_id)
        try:
            return record is not None and self._complete(record, self._clock(), _FINISH_LOCK_S)
        except errors.TooFewValuesError as error:
            self._end_job(job_id, records.JobStatus.FAILED, str(error), unavailable=True)
            return False
        except JobEndedError:
            record = self.read(job_id)
            # If Redis failed over and lost the last values, their batches are computed again.
            is_done = not self._redis.scard(keys.job(job_id) + ":todo")
            if record is not None and not record.status.is_final and is_done:
                raise LookupError("values of its batches are missing in Redis") from None
            return False

    def fail(self, job_id: str, error: str) -> bool:
        """Ends an active job with an error for clients. Returns False if it had already ended."""
        return self._end_job(job_id, records.JobStatus.FAILED, error)

    def _complete(self, record: records.JobRecord, now: float, lock_s: int) -> bool:
        """Builds and stores a job's answer. Returns False if the job has already ended. The caller
        must hold the lock :finishing, which each part extends to `lock_s` seconds.
        """
        key, is_validation = keys.job(record.job_id), record.kind is records.JobKind.VALIDATE
        draft = f"{key}:draft:{uuid.uuid4().hex}"
        url = callbacks.callback_url(
            record.request.url, "validated" if is_validation else "generated"
        )
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

    def _parts(self, record: records.JobRecord, lock_s: int) -> Iterator[Part]:
        """Yields a job's results in parts of about PIECE_BYTES. May raise JobEndedError."""
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
            # each a JSON list of integers
            split = (batch[1:-1].replace(b" ", b"").split(b",") for batch in batches)
            nonces = [nonce for of_one in split for nonce in of_one]
            yield Part(nonces, [value for text in texts for value in text.split(b"\n")])

    def _push(self, draft: str, piece: bytes) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.rpush(draft, piece)
            pipe.expire(draft, _PIECES_TTL_S)
            pipe.execute()

    def _pieces(self, job_id: str, n_bytes: int) -> Iterator[bytes]:
        """Yields the pieces of a stored answer. OSError if a piece has expired."""
        index = 0
        while n_bytes > 0:
            piece = self._redis.lindex(keys.job(job_id) + ":result", index)
            if piece is None:
                raise OSError(f"the answer of job {job_id} expired while it was sent")
            yield piece
            n_bytes -= len(piece)
            index += 1

    def active_jobs(self, model: str) -> list[str]:
        """Returns the ids of a model's active jobs, the oldest first."""
        return [job_id.decode() for job_id in self._redis.zrange(keys.active(model), 0, -1)]

    def recount(self) -> int:
        """Counts the queued nonces again, without those of expired jobs. Returns the new count."""
        return int(self._recount([], [self._settings.job_ttl_sec]))

    def _models(self) -> list[str]:
        return sorted(model.decode() for model in self._redis.smembers(keys.ACTIVE_MODELS))

    def _check_answer(self, job: records.NewJob) -> None:
        n, most = len(job.nonces), self._settings.max_result_bytes
        each = contract_of(job.spec.scheme).bytes_per_artifact(job.spec)
        if n * each > most:
            raise errors.AnswerTooLargeError(
                f"The values of {n} nonces take {each} bytes each, {n * each} together, and an"
                f" answer has at most {most} (POC_MAX_RESULT_BYTES); send at most {most // each}"
                " nonces in one request."
            )

    def _check_room(self, n: int, queued: int) -> None:
        most = self._settings.max_queued_nonces
        if n > most:
            raise errors.QueueFullError(
                f"{n} nonces are more than the {most} that may wait (POC_MAX_QUEUED_NONCES); split"
                " the request."
            )
        if queued + n > most:
            raise errors.QueueFullError(
                f"{queued} nonces wait already and {n} more would exceed the {most} that may"
                f" (POC_MAX_QUEUED_NONCES); send at most {max(0, most - queued)} now, or try again"
                " later."
            )

    def _stage(self, key: str, job: records.NewJob) -> None:
        """Uploads the job's nonces and claims with a short TTL, which create_job.lua extends."""
        batches = {i: list(job.batch(i)) for i in range(job.n_batches)}
        with self._redis.pipeline(transaction=False) as pipe:
            for suffix, values in ((":nonces", batches), (":claimed", job.claimed or {})):
                texts = ((name, json.dumps(value)) for name, value in values.items())
                while chunk := dict(islice(texts, _UPLOAD_CHUNK)):
                    pipe.hset(key + suffix, mapping=chunk)
                    # Again after each command, because the upload can break off after any of them.
                    pipe.expire(key + suffix, _STAGING_TTL_S)
            pipe.execute()

    def _end_job(
        self, job_id: str, status: records.JobStatus, error: str, unavailable: bool = False
    ) -> bool:
        args: list[Any] = [status.value, error, self._clock(), self._ended_ttl_s, int(unavailable)]
        return bool(self._end([keys.job(job_id)], args))

    @property
    def _ended_ttl_s(self) -> int:
        return self._settings.generate_result_ttl_sec


def _record(job_id: str, values: Sequence[bytes | None]) -> records.JobRecord | None:
    found = zip(_RECORD_FIELDS, values, strict=True)
    raw = {name: value.decode() for name, value in found if value is not None}
    if "status" not in raw:
        return None
    spec = records.ProofSpec.model_validate_json(raw["spec"])
    made = {"spec": spec, "request": records.JobRequest.model_validate_json(raw["request"])}
    return _RECORD.validate_python(raw | made | {"job_id": job_id})
