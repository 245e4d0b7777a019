"""What the console shows of the node, read from Redis."""

import json
from typing import Any

from pydantic import JsonValue

from api.health.judgement import Health
from api.health.reading import told, told_seat
from api.health.roster import names_of
from api.proofs import round_control
from api.reading.live import Sections
from api.services import Services
from api.version import VERSION
from poc_core.records import JobKind, JobRecord, JobStatus, RoundRecord, RoundState, WorkerRecord
from poc_core.serving.deployments import DeploymentState
from poc_core.state.client import TRANSIENT
from poc_core.state.overview import Overview
from poc_core.state.rounds import PACE_STEP_S

# Jobs listed: the newest, and of those that have not ended the oldest of each model.
_MOST_JOBS = 30
_MOST_OLD = 10
# Seconds of a round whose pace is drawn.
_PACE_S = 3600
# Excluded nonces shown of a round, the last ones.
_MOST_EXCLUDED = 20
# Fields of a verdict, of any scheme.
_VERDICT = (
    *("n_total", "n_mismatch", "n_invalid", "n_excluded"),
    *("p_value", "probability_honest", "fraud_detected", "fraud_threshold"),
    *("distances", "dist_threshold", "likely_cause"),
)


class View:
    """A repeated reader of the node that remembers what is final; for one thread at a time."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._ended: dict[str, dict[str, JsonValue]] = {}  # jobs that are over, by id
        self._pace_of = ""  # id of the round of `_pace`
        self._pace: dict[int, int] = {}  # beginning of each step of PACE_STEP_S -> nonces

    def read(self) -> Sections:
        """All sections; while Redis is away, only those that say so."""
        try:
            return {"problem": None} | self._sections()
        except TRANSIENT as error:
            self._services.health.watch.note_away(error)
            return {
                "problem": "The node's Redis does not answer. What is shown is what it said last.",
                "health": _health(self._services.health.of(None)),
            }

    def _sections(self) -> dict[str, JsonValue]:
        services = self._services
        now, seen = services.now(), services.overviews.read()
        logs, workers = services.deployments.logs(), list(seen.workers)
        health = services.health.of(seen)
        found: dict[str, Any] = {
            "now": now,
            "health": _health(health),
            "seats": [told_seat(seat) for seat in health.seats],
            "node": self._node(seen, workers),
            "deployment": self._deployment(seen),
            "round": None,
            "pace": None,
            "workers": _workers(workers, health),
            "machines": _machines(workers),
            "logs": [one.model_dump() for one in logs],
            "callbacks": {
                "waiting": seen.callbacks_waiting,
                "jobs": services.outbox.n_jobs(),
                "silent": [vars(receiver) for receiver in seen.silent],
            },
            "jobs": self._jobs(),
        }
        if seen.round is not None:
            found |= {
                "round": self._round(seen, seen.round.record),
                "pace": self._pace_until(seen.round.record, now),
            }
        return found

    def _node(self, seen: Overview, workers: list[WorkerRecord]) -> dict[str, Any]:
        settings = self._services.settings
        ready = [worker for worker in workers if worker.is_ready and worker.info is not None]
        return {
            "version": VERSION,
            "state": (seen.round.record.state if seen.round is not None else RoundState.IDLE).value,
            "chat_policy": settings.chat_policy,
            "total_processed": seen.total_processed,
            "nonces_per_second": round(seen.nonces_per_second, 2),
            "queued_nonces": seen.queued_nonces,
            "queued_nonces_limit": settings.max_queued_nonces,
            "jobs": vars(self._services.jobs.count_active()),
            "models": {worker.model: vars(worker.info) for worker in ready},
        }

    def _deployment(self, seen: Overview) -> dict[str, Any]:
        status, states = seen.deployment, {worker.state for worker in seen.workers}
        state = status.state
        # workers that were started one by one
        if not status.hosts and state is not DeploymentState.FAILED:
            state = DeploymentState.STARTING if "starting" in states else DeploymentState.IDLE
            state = DeploymentState.RUNNING if "ready" in states else state
        return {
            "state": state.value,
            "model": status.wanted.name if status.wanted else None,
            "by": status.record.by if status.record else None,
            "asked_at": status.record.asked_at if status.record else None,
            "error": status.record.error if status.record else None,
            "hosts": [
                report.model_dump(mode="json", exclude={"id", "generation", "places"})
                for report in status.hosts
            ],
        }

    def _round(self, seen: Overview, current: RoundRecord) -> dict[str, Any]:
        stats = round_control.stats_of(self._services, seen)
        stats["excluded_nonces"] = stats["excluded_nonces"][-_MOST_EXCLUDED:]
        del stats["elapsed_seconds"]  # it would change with each look; the page counts by itself
        stats["nonces_per_second"] = round(stats["nonces_per_second"], 2)
        del stats["nonces_per_second_of_round"]
        return {
            "id": current.round_id,
            "state": current.state.value,
            "scheme": current.config.spec.scheme,
            "config": round_control.config_of(current.config),
            "created_at": current.created_at,
            "started_at": current.started_at,
            "stopped_at": current.stopped_at,
            "n_reported": current.n_valid,
            **stats,
        }

    def _pace_until(self, current: RoundRecord, now: float) -> dict[str, Any] | None:
        """Nonces of each whole step of PACE_STEP_S in the last hour."""
        if current.started_at is None:
            return None
        end = int((current.stopped_at or now) // PACE_STEP_S * PACE_STEP_S)
        first = max(int(current.started_at // PACE_STEP_S * PACE_STEP_S), end - _PACE_S)
        if self._pace_of != current.round_id:
            self._pace_of, self._pace = current.round_id, {}
            since = first
        else:
            since = max(first, end - 60)  # what was computed in the last moment may come late
        self._pace |= self._services.rounds.pace(current.round_id, since, end)
        self._pace = {begin: n for begin, n in self._pace.items() if begin >= first}
        counts = [self._pace.get(begin, 0) for begin in range(first, end, PACE_STEP_S)]
        return {"round": current.round_id, "first": first, "step_s": PACE_STEP_S, "counts": counts}

    def _jobs(self) -> list[JsonValue]:
        jobs = self._services.jobs
        listed = jobs.survey.newest(_MOST_JOBS, _MOST_OLD)
        known = {job_id: job for job_id, job in self._ended.items() if job_id in listed}
        asked = [job_id for job_id in listed if job_id not in known]
        found = {
            record.job_id: self._job(record)
            for record in jobs.read_all(asked)
            if record is not None
        }
        self._ended = known | {
            job_id: job for job_id, job in found.items() if JobStatus(str(job["status"])).is_final
        }
        every = known | found
        return [every[job_id] for job_id in listed if job_id in every]

    def _job(self, record: JobRecord) -> dict[str, JsonValue]:
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
            "verdict": self._verdict(record),
        }

    def _verdict(self, record: JobRecord) -> JsonValue:
        if record.kind is not JobKind.VALIDATE or record.status is not JobStatus.COMPLETED:
            return None
        answer = self._services.jobs.result(record.job_id)
        if answer is None or answer.is_in_pieces:  # megabytes: whoever wants it asks for it
            return None
        found = json.loads(b"".join(answer.pieces))
        return {name: found[name] for name in _VERDICT if name in found}


def _health(health: Health) -> JsonValue:
    """As other answers tell it, without sentences that change each second: the page counts."""
    whole = told(health, 0.0)
    for reason in whole["reasons"]:
        del reason["text"]
    return whole


def _workers(workers: list[WorkerRecord], health: Health) -> list[JsonValue]:
    names = names_of(health.seats, workers)
    silent = {seat.worker.id for seat in health.seats if seat.worker and seat.state == "silent"}
    return [
        {
            "id": worker.id,
            "name": names[worker.id],
            "model": worker.model,
            "engine": worker.engine,
            "host": worker.host,
            "pid": worker.pid,
            "port": worker.port,
            "state": worker.state,
            "is_silent": worker.id in silent,
            "started_at": worker.started_at,
            "info": vars(worker.info) if worker.info else None,
            "stats": dict(worker.stats),
            "devices": _devices(worker),
        }
        for worker in workers
    ]


def _machines(workers: list[WorkerRecord]) -> dict[str, JsonValue]:
    """The GPUs of each host, by its workers' records."""
    found: dict[str, JsonValue] = {}
    for worker in workers:
        devices = worker.gpus.get("devices")
        if devices:
            found[worker.host] = devices
    return found


def _devices(worker: WorkerRecord) -> list[JsonValue]:
    """Names of the GPUs that the worker may use, or of all its machine's if it is not pinned."""
    devices = worker.gpus.get("devices")
    if not isinstance(devices, list):
        return []
    pinned = [part.strip() for part in worker.visible_gpus.split(",") if part.strip()]
    return [
        f"{device.get('index')}: {device.get('name')}"
        for device in devices
        if isinstance(device, dict)
        and (not pinned or str(device.get("index")) in pinned or str(device.get("uuid")) in pinned)
    ]
