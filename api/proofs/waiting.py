"""Sends a job's result to the client: at once, or once the job has ended (`wait: true`)."""

import threading
import time

import anyio
from fastapi import HTTPException, Request, Response
from fastapi.responses import StreamingResponse

from api.edge.body_limit import BODY_DONE
from api.errors import OUTLASTED_S, Outlasting, unavailable
from poc_core.records import JobRecord, JobStatus
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore

# Shortest and longest pause in seconds between two reads of a job; the pause grows while waiting.
_FIRST_LOOK_S = 0.01
_LONGEST_PAUSE_S = 0.25
# Most reads of jobs per second, for all waiting requests: each takes a millisecond.
_LOOKS_PER_S = 200
# Threads that waiting requests use together without Redis. A read uses its thread for half a
# second, or for 5 s if Redis is silent: then more than 40 requests use more threads, because no
# pause is longer than OUTLASTED_S.
_THREADS_AWAY = 10
_READ_AWAY_S = 0.5

_JSON = "application/json"


def result_response(jobs: JobStore, job_id: str) -> Response | None:
    """Returns a completed job's result; None if it has expired. Blocks: call it in a thread."""
    answer = jobs.result(job_id)
    if answer is None:
        return None
    if not answer.is_in_pieces:
        return Response(b"".join(answer.pieces), media_type=_JSON)
    return StreamingResponse(
        answer.pieces, media_type=_JSON, headers={"Content-Length": str(answer.n_bytes)}
    )


class InlineJobs:
    """Counts and answers the requests that wait until their job has ended, up to a limit."""

    def __init__(
        self, settings: Settings, jobs: JobStore, rounds: RoundStore, workers: WorkerRegistry
    ) -> None:
        self.limit = settings.max_waiting_requests
        self.n_waiting = 0
        self._timeout_s = settings.generate_chunk_timeout_sec
        self._jobs = jobs
        self._rounds = rounds
        self._workers = workers
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Counts a request as waiting until `leave` is called. Raises HTTPException 429 if too many
        requests wait already.
        """
        with self._lock:
            if self.n_waiting >= self.limit:
                raise unavailable(
                    f"{self.limit} requests wait for their jobs already"
                    " (POC_MAX_WAITING_REQUESTS); send it with wait=false and poll, or try again"
                    " later.",
                    429,
                )
            self.n_waiting += 1

    def leave(self) -> None:
        with self._lock:
            self.n_waiting -= 1

    async def answer_when_ended(self, request: Request, job_id: str) -> Response:
        """Waits until a job counted by `enter` has ended. Returns its result. Blocks no thread.

        Calls `leave` at the end. HTTPException 503 if the job has too few values for a verdict, 500
        if it failed for another reason, 409 if it was cancelled. 503 also if the job has made no
        progress for POC_GENERATE_CHUNK_TIMEOUT_SEC; the job is then cancelled, so that a repeated
        request does not compute it twice.
        """
        request.scope[BODY_DONE]()
        try:
            return await self._answer_when_ended(request, job_id)
        finally:
            self.leave()

    async def _answer_when_ended(self, request: Request, job_id: str) -> Response:
        pause_s, progress, moved_at = _FIRST_LOOK_S, None, time.monotonic()
        redis = Outlasting()
        while True:
            found = await redis.read(self._look, job_id)
            if found is None:
                progress = None  # no worker can store a batch meanwhile
                if await request.is_disconnected():
                    return Response(status_code=499)
                away_s = self.n_waiting * max(redis.failed_s, _READ_AWAY_S) / _THREADS_AWAY
                await anyio.sleep(min(max(_LONGEST_PAUSE_S, away_s), OUTLASTED_S))
                continue
            record, seen = found
            if record is None:
                raise unavailable("The node's Redis lost the job; send the request again.")
            if record.status.is_final:
                answer = await redis.read(_answer, self._jobs, record)
                if answer is not None:
                    return answer
                continue
            if seen != progress:
                progress, moved_at = seen, time.monotonic()
            elif time.monotonic() - moved_at > self._timeout_s:
                if not await redis.read(self._cancel, record):
                    progress = None
                    continue
                raise unavailable(
                    f"No batch was done within {self._timeout_s:g} s"
                    f" (POC_GENERATE_CHUNK_TIMEOUT_SEC), so the job {job_id} was cancelled. Send it"
                    " again later, or with wait=false."
                )
            # the job continues: its result can be fetched and may have a callback
            if await request.is_disconnected():
                return Response(status_code=499)
            await anyio.sleep(max(pause_s, self.n_waiting / _LOOKS_PER_S))
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _look(self, job_id: str) -> tuple[JobRecord | None, tuple[object, ...]]:
        """Returns the job's record, and a tuple that changes when the job makes progress.

        Waiting for a round's end is progress. The record is None if Redis lost the job.
        """
        record = self._jobs.read(job_id)
        if record is None:
            return None, ()
        if self._rounds.generating(record.model) is not None:  # which can take long
            return record, (time.monotonic(),)
        # A queued job makes progress when the batches of jobs before it are computed.
        ahead = self._jobs.total_processed() if record.status is JobStatus.QUEUED else None
        return record, (record.status, record.n_done, record.waiting_for, ahead)

    def _cancel(self, record: JobRecord) -> bool:
        """Cancels a job without progress. Returns False if the job has ended meanwhile, or waits
        for the chat of a living worker, which can take long.
        """
        if record.waiting_for == "chat" and self._workers.live(record.model):
            return False
        return self._jobs.cancel(record.job_id)


def _answer(jobs: JobStore, record: JobRecord) -> Response:
    if record.status is JobStatus.FAILED and record.unavailable:
        raise unavailable(
            {"error": "no_verdict", "message": record.error, "request_id": record.job_id}
        )
    if record.status is JobStatus.FAILED:
        raise HTTPException(
            500, {"error": "failed", "message": record.error, "request_id": record.job_id}
        )
    if record.status is JobStatus.CANCELLED:
        message = "The job was cancelled; send the request again if it is still wanted."
        raise HTTPException(
            409, {"error": "cancelled", "message": message, "request_id": record.job_id}
        )
    response = result_response(jobs, record.job_id)
    if response is None:
        raise unavailable(
            "The job's result expired before it could be sent; send the request again."
        )
    return response
