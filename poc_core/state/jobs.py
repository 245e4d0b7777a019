"""Jobs in Redis. The API creates a job, workers compute its batches, and one worker finishes it.

Redis holds the work. A Celery message only announces work, and may come twice, late or never.
Workers lease batches of the first job in their model's line, which is a queue (state/work.py).
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from pydantic import TypeAdapter

from poc_core.callbacks import receiver_of
from poc_core.errors import AnswerTooLargeError, QueueFullError, TooFewValuesError
from poc_core.queues import messages, model_queue
from poc_core.records import JobRecord, JobRequest, JobStatus, NewJob, ProofSpec
from poc_core.schemes import contract_of
from poc_core.state import keys, scripts
from poc_core.state.job_results import JobEndedError, JobResults

# Attempts to build a job's answer before the job fails, and seconds without progress after which an
# attempt counts as failed.
MAX_FINISHES = 5
_FINISH_LOCK_S = 20

# TTL in seconds of uploaded nonces whose job is not created yet. 100,000 nonces take 1 s.
_STAGING_TTL_S = 120

# Hash fields per upload command: Redis must serve other clients between two commands.
_UPLOAD_CHUNK = 2000

# Jobs cancelled or counted per script call: about 5 ms of Redis' time, so that Redis serves other
# clients in between.
_CHUNK = 500

# The fields of a job's hash that make a JobRecord; the result may take megabytes.
_RECORD_FIELDS = [field.name for field in fields(JobRecord) if field.name != "job_id"]
_RECORD = TypeAdapter(JobRecord)


@dataclass(frozen=True)
class ActiveJobs:
    """The numbers of active jobs, which are queued or running."""

    queued: int
    running: int
    waiting_for_chat: int  # queued and running jobs


class JobStore(JobResults):
    """The store of jobs. Each operation is atomic in Redis and safe to repeat."""

    _create = scripts.of_store("create_job")
    _note_waiting = scripts.of_store("note_waiting")
    _begin_finish = scripts.of_store("begin_finish")
    _end = scripts.of_store("end_job")
    _cancel = scripts.of_store("cancel_queued")
    _recount = scripts.of_store("recount")
    _count = scripts.of_store("count_jobs")

    # Clients: create, read, end.

    def create(self, job: NewJob) -> str:
        """Stores a job as queued, and returns its id.

        QueueFullError if too many nonces, jobs or callbacks would wait. AnswerTooLargeError if the
        job's answer would be too large.
        """
        self._check_answer(job)
        # Also checked before the upload, which may take megabytes.
        self._check_room(len(job.nonces), self.queued_nonces())
        job_id = uuid.uuid4().hex
        key = keys.job(job_id)
        self._stage(key, job)
        now = self._clock()
        fields: dict[str, Any] = {
            "status": JobStatus.QUEUED.value,
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
        args += [receiver_of(url or ""), job.client, now, settings.job_ttl_sec]
        args += [part for item in fields.items() for part in item]
        what, *found = self._create([key], args)
        if what == b"nonces":
            self._check_room(len(job.nonces), found[0])
        if what == b"jobs":
            raise QueueFullError(
                f"{found[0]} jobs have not ended, as many as may (a fifth of"
                " POC_MAX_QUEUED_NONCES); wait for some to end, and send more nonces in one"
                " request."
            )
        if what == b"callbacks":
            most = f"{settings.max_callbacks} jobs or {settings.outbox_max_bytes} bytes of them"
            most += " (POC_OUTBOX_MAX_BYTES)"
            raise QueueFullError(
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

    def read(self, job_id: str) -> JobRecord | None:
        """Returns a job's record; None if the job is unknown or has expired."""
        return self.read_all([job_id])[0]

    def read_all(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """Returns the records of several jobs, read in one request. See `read` for missing jobs."""
        with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(keys.job(job_id), _RECORD_FIELDS)
            return [_record(*found) for found in zip(job_ids, pipe.execute(), strict=True)]

    def cancel(self, job_id: str) -> bool:
        """Cancels a queued or running job. Returns False if the job had already ended."""
        return self._end_job(job_id, JobStatus.CANCELLED, "")

    def cancel_queued(self) -> int:
        """Cancels jobs that have not started and whose client does not wait. Returns their number.

        Also deletes the Celery messages of these jobs' models. Workers find the remaining jobs
        without messages.
        """
        n_cancelled = 0
        for model in self._models():
            n_seen, n_here, n_stay = _CHUNK, 0, 0
            while n_seen == _CHUNK:
                args: list[float] = [n_stay, _CHUNK, self._clock(), self._ended_ttl_s]
                n_seen, n, stay = self._cancel([keys.active(model)], args)
                n_here, n_stay = n_here + n, n_stay + stay
            if n_here:
                self._redis.unlink(messages(model_queue(model)))
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
        """Returns the ids of the newest jobs, then the ids of each model's oldest active jobs.

        `most`: how many newest jobs, at most 100; the newest job comes first. `most_old`: how many
        active jobs of each model.
        """
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.lrange(keys.NEWEST_JOBS, 0, most - 1)
            for model in self._models():
                pipe.zrange(keys.active(model), 0, most_old - 1)
            newest, *old = pipe.execute()
        found = [*newest, *(job_id for ids in old for job_id in reversed(ids))]
        return [job_id.decode() for job_id in dict.fromkeys(found)]

    def total_processed(self) -> int:
        """Returns the number of computed nonces.

        After job_ttl_sec without computed nonces, the number starts from 0 again.
        """
        return int(self._redis.get(keys.STATS_TOTAL) or 0)

    def verdicts(self) -> dict[str, int]:
        """Returns the number of validations for each verdict, "honest" and "fraud".

        After 30 days without a validation, the numbers start from 0 again.
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
        """Stores what the jobs wait for, as shown to clients: "chat", or "" if the jobs continue.

        Returns False if none of the jobs can be computed now, because all have ended or a round
        uses the workers.
        """
        names = [keys.job(job_id) for job_id in job_ids]
        return bool(self._note_waiting(names, [what, self._settings.job_ttl_sec]))

    def finish(self, job_id: str) -> bool:
        """Builds and stores the answer of a job whose batches are all done.

        Returns True if this call stored the answer. The job fails after MAX_FINISHES unsuccessful
        attempts.
        """
        limits = [_FINISH_LOCK_S, MAX_FINISHES, self._clock(), self._ended_ttl_s]
        if not self._begin_finish([keys.job(job_id)], [uuid.uuid4().hex, *limits]):
            return False
        record = self.read(job_id)
        try:
            return record is not None and self._complete(record, self._clock(), _FINISH_LOCK_S)
        except TooFewValuesError as error:
            self._end_job(job_id, JobStatus.FAILED, str(error), unavailable=True)
            return False
        except JobEndedError:
            record = self.read(job_id)
            if record is not None and not record.status.is_final:
                raise LookupError("values of its batches are missing in Redis") from None
            return False

    def fail(self, job_id: str, error: str) -> bool:
        """Ends an active job as failed. Returns False if the job had already ended.

        `error`: a sentence for clients.
        """
        return self._end_job(job_id, JobStatus.FAILED, error)

    def active_jobs(self, model: str, most: int = 0) -> list[str]:
        """Returns the ids of a model's active jobs, the oldest first. `most`: 0 for all."""
        return [job_id.decode() for job_id in self._redis.zrange(keys.active(model), 0, most - 1)]

    def recount(self) -> int:
        """Counts the queued nonces again, because the counter includes nonces of expired jobs.

        Returns the corrected count.
        """
        return int(self._recount([], [self._settings.job_ttl_sec]))

    def _models(self) -> list[str]:
        return sorted(model.decode() for model in self._redis.smembers(keys.ACTIVE_MODELS))

    def _check_answer(self, job: NewJob) -> None:
        n, most = len(job.nonces), self._settings.max_result_bytes
        each = contract_of(job.spec.scheme).bytes_per_artifact(job.spec)
        if n * each > most:
            raise AnswerTooLargeError(
                f"The values of {n} nonces take {each} bytes each, {n * each} together, and an"
                f" answer has at most {most} (POC_MAX_RESULT_BYTES); send at most {most // each}"
                " nonces in one request."
            )

    def _check_room(self, n: int, queued: int) -> None:
        most = self._settings.max_queued_nonces
        if n > most:
            raise QueueFullError(
                f"{n} nonces are more than the {most} that may wait (POC_MAX_QUEUED_NONCES); split"
                " the request."
            )
        if queued + n > most:
            raise QueueFullError(
                f"{queued} nonces wait already and {n} more would exceed the {most} that may"
                f" (POC_MAX_QUEUED_NONCES); send at most {max(0, most - queued)} now, or try again"
                " later."
            )

    def _stage(self, key: str, job: NewJob) -> None:
        """Uploads the job's nonces and claims with a short TTL, which create_job.lua extends."""
        batches = {i: list(job.batch(i)) for i in range(job.n_batches)}
        with self._redis.pipeline(transaction=False) as pipe:
            for suffix, values in ((":nonces", batches), (":claimed", job.claimed or {})):
                texts = ((name, json.dumps(value)) for name, value in values.items())
                while chunk := dict(islice(texts, _UPLOAD_CHUNK)):
                    pipe.hset(key + suffix, mapping=chunk)
                pipe.expire(key + suffix, _STAGING_TTL_S)
            pipe.execute()

    def _end_job(
        self, job_id: str, status: JobStatus, error: str, unavailable: bool = False
    ) -> bool:
        args: list[Any] = [status.value, error, self._clock(), self._ended_ttl_s, int(unavailable)]
        return bool(self._end([keys.job(job_id)], args))

    @property
    def _ended_ttl_s(self) -> int:
        return self._settings.generate_result_ttl_sec


def _record(job_id: str, values: Sequence[bytes | None]) -> JobRecord | None:
    """Builds a job's record from the values of _RECORD_FIELDS; None if the job is missing."""
    found = zip(_RECORD_FIELDS, values, strict=True)
    raw = {name: value.decode() for name, value in found if value is not None}
    if "status" not in raw:
        return None
    spec = ProofSpec.model_validate_json(raw["spec"])
    made = {"spec": spec, "request": JobRequest.model_validate_json(raw["request"])}
    return _RECORD.validate_python(raw | made | {"job_id": job_id})
