"""Reads jobs and rounds for the console: summaries for the list, details for one job or round."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue
from redis import Redis

from api.bodies import config_of
from poc_core.callbacks import redacted
from poc_core.records import JobKind, JobRecord, JobStatus, RoundRecord
from poc_core.state import keys
from poc_core.state.history import shares
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from poc_core.state.parsing import OutboxStatus
from poc_core.state.rounds import RoundStore

# How many jobs the list shows: the newest jobs, and the oldest unfinished jobs of each model.
_MOST_JOBS = 50
_MOST_OLD = 10
_MOST_ROUNDS = 20
# Fields of a verdict that the console shows, for all schemes.
_VERDICT = (
    *("n_total", "n_mismatch", "n_invalid", "n_excluded", "p_value", "probability_honest"),
    *("fraud_detected", "fraud_threshold", "distances", "dist_threshold", "likely_cause"),
)


@dataclass(frozen=True)
class Work:
    _jobs: JobStore
    _rounds: RoundStore
    _outbox: Outbox
    _redis: Redis

    def listed(self, ended: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns summaries of jobs and rounds, newest first. `ended`: a cache of ended jobs."""
        newest = self._rounds.newest(_MOST_ROUNDS)
        found = self._listed_jobs(ended) + [round_line(record) for record in newest]
        return sorted(found, key=lambda one: float(one["created_at"]), reverse=True)

    def _listed_jobs(self, ended: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        listed = self._jobs.newest(_MOST_JOBS, _MOST_OLD)
        lines = {job_id: job for job_id, job in ended.items() if job_id in listed}
        for record in self._jobs.read_all([job_id for job_id in listed if job_id not in lines]):
            if record is not None:
                lines[record.job_id] = self.job_line(record)
        ended.clear()
        ended |= {job_id: job for job_id, job in lines.items() if JobStatus(job["status"]).is_final}
        return [lines[job_id] for job_id in listed if job_id in lines]

    def job_line(self, record: JobRecord) -> dict[str, Any]:
        spec = record.spec.model_dump()
        # Without lists and objects: the claims of a decode proof take megabytes, each second.
        spec["options"] = {
            name: value
            for name, value in record.spec.options.items()
            if not isinstance(value, dict | list)
        }
        return {
            "id": record.job_id,
            "kind": record.kind.value,
            "status": record.status.value,
            "model": record.model,
            "spec": spec,
            "owner": record.request.model_dump(include={"block_height", "node_id", "node_count"}),
            "n_total": record.n_total,
            "n_done": record.n_done,
            "created_at": record.created_at,
            "started_at": record.started_at,
            "finished_at": record.finished_at,
            "error": record.error,
            "waiting_for": None if record.status.is_final else record.waiting_for,
            "verdict": self._verdict(record),
        }

    def job_page(self, job_id: str) -> dict[str, Any] | None:
        record = self._jobs.read(job_id)
        if record is None:
            return None
        return self.job_line(record) | {
            "n_batches": record.n_batches,
            "workers": shares(self._redis, keys.job(job_id)),
            "url": redacted(record.request.url),
            "delivery": self._delivery(job_id) if record.request.url else None,
        }

    def round_page(self, round_id: str) -> dict[str, Any] | None:
        record = self._rounds.read(round_id)
        if record is None:
            return None
        has_receiver = record.config.url is not None
        return round_line(record) | {
            "config": config_of(record.config),
            "scheme": record.config.spec.scheme,
            "n_reported": record.n_valid,
            "n_excluded": record.n_excluded,
            "exhausted": record.is_exhausted,
            "workers": shares(self._redis, keys.round(round_id)),
            "url": redacted(record.config.url),
            "delivery": self._delivery(round_id) if has_receiver else None,
        }

    def _delivery(self, outbox_id: str) -> dict[str, JsonValue]:
        status: OutboxStatus = self._outbox.status(outbox_id)
        return {
            "waiting": status.waiting,
            "waiting_bytes": status.waiting_bytes,
            "delivered": status.delivered,
            "dropped": status.dropped,
            "failures": status.failures,
            "next_try_at": status.next_at if status.failures else None,
            "last_error": status.last_error,
        }

    def _verdict(self, record: JobRecord) -> JsonValue:
        if record.kind is not JobKind.VALIDATE or record.status is not JobStatus.COMPLETED:
            return None
        answer = self._jobs.result(record.job_id)
        # too large for the console: a client can request the result
        if answer is None or answer.is_in_pieces:
            return None
        found = json.loads(b"".join(answer.pieces))
        return {name: found[name] for name in _VERDICT if name in found}


def round_line(record: RoundRecord) -> dict[str, Any]:
    """Returns a round's summary for the console's list, with the field names of `job_line`."""
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
