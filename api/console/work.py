"""Jobs and rounds as the console shows them: a line each in lists, all there is on their pages."""

import json
from typing import Any

from pydantic import JsonValue

from api.proofs import round_control
from api.services import Services
from poc_core.callbacks import redacted
from poc_core.records import JobKind, JobRecord, JobStatus, RoundRecord
from poc_core.state import keys
from poc_core.state.delivery.outbox import OutboxStatus
from poc_core.state.past.shares import shares

# Jobs listed: the newest, and of those that have not ended the oldest of each model.
_MOST_JOBS = 50
_MOST_OLD = 10
_MOST_ROUNDS = 20
# Fields of a verdict, of any scheme.
_VERDICT = (
    "n_total",
    "n_mismatch",
    "n_invalid",
    "n_excluded",
    "p_value",
    "probability_honest",
    "fraud_detected",
    "fraud_threshold",
    "distances",
    "dist_threshold",
    "likely_cause",
)


class Work:
    """A repeated reader of jobs and rounds that remembers what is final; for one thread."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._ended: dict[str, dict[str, Any]] = {}  # jobs that are over, by id

    def read(self) -> list[dict[str, Any]]:
        """The jobs and rounds listed, the newest first."""
        newest = self._services.rounds.newest(_MOST_ROUNDS)
        found = self._jobs() + [round_line(record) for record in newest]
        return sorted(found, key=lambda one: float(one["created_at"]), reverse=True)

    def _jobs(self) -> list[dict[str, Any]]:
        jobs = self._services.jobs
        listed = jobs.survey.newest(_MOST_JOBS, _MOST_OLD)
        known = {job_id: job for job_id, job in self._ended.items() if job_id in listed}
        asked = [job_id for job_id in listed if job_id not in known]
        found = {
            record.job_id: job_line(self._services, record)
            for record in jobs.read_all(asked)
            if record is not None
        }
        self._ended = known | {
            job_id: job for job_id, job in found.items() if JobStatus(job["status"]).is_final
        }
        every = known | found
        return [every[job_id] for job_id in listed if job_id in every]


def job_line(services: Services, record: JobRecord) -> dict[str, Any]:
    """A job without what only its page shows."""
    return {
        "id": record.job_id,
        "kind": record.kind.value,
        "status": record.status.value,
        "model": record.model,
        "spec": record.spec.model_dump(),
        "owner": record.request.model_dump(include={"block_height", "node_id", "node_count"}),
        "n_total": record.n_total,
        "n_done": record.n_done,
        "created_at": record.created_at,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "error": record.error,
        "waiting_for": None if record.status.is_final else record.waiting_for,
        "verdict": _verdict(services, record),
    }


def round_line(record: RoundRecord) -> dict[str, Any]:
    """A round in the words of `job_line`, as far as it has the same."""
    return {
        "id": record.round_id,
        "kind": "round",
        "status": record.state.value.lower(),
        "model": record.config.model,
        "n_done": record.n_processed,
        "created_at": record.created_at,
        "started_at": record.started_at,
        "finished_at": record.stopped_at,
        "error": record.error,
    }


def job_page(services: Services, job_id: str) -> dict[str, Any] | None:
    """All of a job; None: it is not known, or not any more."""
    record = services.jobs.read(job_id)
    if record is None:
        return None
    return job_line(services, record) | {
        "n_batches": record.n_batches,
        "workers": shares(services.redis, keys.job(job_id)),
        "url": redacted(record.request.url),
        "delivery": _delivery(services, job_id) if record.request.url else None,
    }


def round_page(services: Services, round_id: str) -> dict[str, Any] | None:
    """All of a round; None: it is not known, or not any more."""
    record = services.rounds.read(round_id)
    if record is None:
        return None
    has_receiver = record.config.url is not None
    return round_line(record) | {
        "config": round_control.config_of(record.config),
        "scheme": record.config.spec.scheme,
        "n_reported": record.n_valid,
        "n_excluded": record.n_excluded,
        "exhausted": record.is_exhausted,
        "workers": shares(services.redis, keys.round(round_id)),
        "url": redacted(record.config.url),
        "delivery": _delivery(services, round_id) if has_receiver else None,
    }


def _delivery(services: Services, outbox_id: str) -> dict[str, JsonValue]:
    status: OutboxStatus = services.outbox.status(outbox_id)
    return {
        "waiting": status.waiting,
        "waiting_bytes": status.waiting_bytes,
        "delivered": status.delivered,
        "dropped": status.dropped,
        "failures": status.failures,
        "next_try_at": status.next_at if status.failures else None,
        "last_error": status.last_error,
    }


def _verdict(services: Services, record: JobRecord) -> JsonValue:
    if record.kind is not JobKind.VALIDATE or record.status is not JobStatus.COMPLETED:
        return None
    answer = services.jobs.result(record.job_id)
    if answer is None or answer.is_in_pieces:  # megabytes: whoever wants it asks for it
        return None
    found = json.loads(b"".join(answer.pieces))
    return {name: found[name] for name in _VERDICT if name in found}
