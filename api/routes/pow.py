"""/api/v1/pow: jobs and the node's status (protocol.md, section 5)."""

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, HTTPException, Query, Request, Response
from pydantic import BaseModel

from api import bodies
from api.edge.shares import client_of
from api.health.reading import HealthReader
from api.health.roster import Seat
from api.proofs.waiting import result_response
from api.routes import examples
from api.routes.reference import json_body, json_examples
from api.routes.services import AppServices
from api.version import VERSION
from poc_core import answers
from poc_core.records import JobRecord, JobStatus
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.overview import Overview
from poc_core.state.rounds import MOST_LISTED

router = APIRouter(prefix="/api/v1/pow", tags=["proof of compute"], responses=examples.REDIS_AWAY)


# The range of a round's reported nonces that /status lists, if the scheme lists them.
ValidFrom = Annotated[
    int | None,
    Query(
        ge=0,
        le=2**53 - 1,  # Redis counts exactly up to here
        description="Index of the first listed valid nonce; absent: the newest are listed.",
    ),
]
ValidLimit = Annotated[
    int, Query(ge=1, le=MOST_LISTED, description="Largest number of listed valid nonces.")
]

# Aggregators have these two routes under their own paths.
of_aggregators = APIRouter(
    prefix="/api/v1/inference/pow", tags=["aggregator"], responses=examples.REDIS_AWAY
)

_GENERATE_ROUTE: dict[str, Any] = {
    "summary": "Compute or validate the artifacts of given nonces",
    "response_model": None,
    "openapi_extra": json_body(bodies.job_bodies()),
    "responses": {
        200: json_examples(
            "Queued (wait=false) or the result (wait=true).",
            {"queued": examples.QUEUED_EXAMPLE, **examples.RESULTS},
            answers.one_of(answers.Queued, *answers.RESULTS),
        ),
        **examples.GENERATE_ERRORS,
    },
}
_READ_ROUTE: dict[str, Any] = {
    "summary": "Fetch a job's progress or result",
    "responses": {
        200: json_examples(
            "The result of a completed job, otherwise the job's progress.",
            {"running": examples.RUNNING_EXAMPLE, **examples.RESULTS},
            answers.one_of(answers.Progress, *answers.RESULTS),
        ),
        **examples.UNKNOWN_JOB,
    },
}


@router.post("/generate", **_GENERATE_ROUTE)
@of_aggregators.post("/generate", **_GENERATE_ROUTE)
async def generate(request: Request, services: AppServices) -> Response | answers.Queued:
    """Queues a job: its nonces are split into batches that all workers of the model compute.

    The request is checked completely first. With `wait`, returns the result; the job continues if
    the client disconnects.
    """
    job_id, job = await services.admission.submit(
        await bodies.whole_body(request), client_of(request.scope)
    )
    if job.inline:
        return await services.inline.answer_when_ended(request, job_id)
    return answers.Queued(request_id=job_id, queued_count=len(job.nonces))


@router.get("/generate/{request_id}", **_READ_ROUTE)
@of_aggregators.get("/generate/{request_id}", **_READ_ROUTE)
async def read_job(request_id: str, services: AppServices) -> Response:
    """Returns a job's progress or result. 404 after POC_GENERATE_RESULT_TTL_SEC."""
    record = await services.together.get(
        ("job", request_id), lambda: _find(request_id, services.jobs)
    )
    if record is not None and record.status is JobStatus.COMPLETED:
        response = await to_thread.run_sync(result_response, services.jobs, request_id)
        if response is not None:
            return response
        record = None  # expired in between
    if record is None:
        raise _unknown(services.settings)
    is_final = record.status.is_final
    told = vars(record) | {
        "status": record.status.value,
        "request_id": record.job_id,
        "waiting_for": None if is_final else record.waiting_for,
    }
    progress = answers.Progress.model_validate(told)
    return Response(progress.model_dump_json(exclude_none=True), media_type="application/json")


@router.delete(
    "/generate/{request_id}",
    summary="Cancel a job",
    responses=examples.UNKNOWN_JOB,
)
def cancel_job(request_id: str, services: AppServices) -> answers.Cancelled:
    """Cancels a queued or running job and drops its results. A finished job does not change."""
    if _find(request_id, services.jobs) is None:
        raise _unknown(services.settings)
    return answers.Cancelled(cancelled=services.jobs.cancel(request_id))


def _find(request_id: str, jobs: JobStore) -> JobRecord | None:
    return jobs.read(request_id) if len(request_id) == 32 and request_id.isalnum() else None


def _unknown(settings: Settings) -> HTTPException:
    kept_s = settings.generate_result_ttl_sec
    return HTTPException(
        404,
        f"No job has this request_id; results are kept for {kept_s} s"
        " (POC_GENERATE_RESULT_TTL_SEC).",
    )


@router.get(
    "/status",
    summary="Show the node's state, rates and workers",
    responses={200: {"model": answers.STATUS}},
)
async def status(
    services: AppServices, valid_from: ValidFrom = None, valid_limit: ValidLimit = MOST_LISTED
) -> Response:
    """Returns the node's state, its workers and its queue. Only rounds change the state."""

    def read() -> bytes:  # once for all concurrent requests
        seen = services.overviews.read()
        round_status = services.round_control.status_of(seen, valid_from, valid_limit)
        return _status(seen, round_status, services.health)

    found = await services.together.get(("status", valid_from, valid_limit), read)
    return Response(found, media_type="application/json")


def _status(seen: Overview, round_status: dict[str, Any], reader: HealthReader) -> bytes:
    health = reader.of(seen)
    names = health.names_of(seen.workers)
    whole = round_status | {
        "queued_nonces": seen.queued_nonces,
        "callbacks_waiting": seen.callbacks_waiting,
        "silent_receivers": [vars(receiver) for receiver in seen.silent],
        "workers": [
            {**vars(worker), "name": names[worker.id], "chat_secret": None}
            for worker in seen.workers
        ],
        "health": reader.answer(health),
        "seats": [_seat(seat) for seat in health.seats],
        "version": VERSION,
    }
    # A scheme's fields are absent from other schemes' rounds, not null.
    made: BaseModel = answers.STATUS.model_validate(whole)
    return made.model_dump_json(exclude_unset=True).encode()


def _seat(seat: Seat) -> dict[str, Any]:
    place = seat.place
    return {
        "name": seat.name,
        "host": seat.host,
        "model": seat.model,
        "state": seat.state,
        "since": seat.since,
        "worker_id": seat.worker.id if seat.worker else None,
        "pid": seat.worker.pid if seat.worker else place.pid if place else None,
        "restarts": place.restarts if place else 0,
        "restarts_lately": place.restarts_lately if place else 0,
        "last_exit": place.last_exit if place else None,
        "last_exit_at": place.last_exit_at if place else None,
    }


@router.post("/stop", summary="Stop the round and cancel the jobs")
def stop(services: AppServices) -> answers.Stopped:
    """Stops the round within one micro-batch; computed values are still delivered.

    Cancels queued jobs. Running jobs, and jobs whose client waits (wait=true), are still computed;
    DELETE /generate/{request_id} ends one of them. Callbacks that a receiver did not accept in five
    tries in a row are given up.
    """
    return answers.Stopped(cancelled_jobs=services.round_control.stop())
