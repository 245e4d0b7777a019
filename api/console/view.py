"""Reads the node's state from Redis for the console."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from api.console import fleet
from api.console.live import Sections
from api.console.work import Work
from api.health.judgement import Health
from api.health.reading import HealthReader
from api.health.roster import deployment_state, summed_by_name
from api.version import VERSION
from poc_core.records import RoundState, WorkerRecord
from poc_core.redis_at.connections import is_transient
from poc_core.serving.deployments import DeploymentStatus
from poc_core.settings import Settings
from poc_core.state import history
from poc_core.state.events import Events
from poc_core.state.jobs import JobStore
from poc_core.state.overview import Overview, Overviews

# Last steps that are sent again whenever a step ends, so that late data is included.
_TOLD_STEPS = 3
# Steps of 5 s over which the time to the first token is computed: five minutes.
_CHAT_STEPS = 60
_SHORTEST_S = min(history.STEPS)
# Seconds after a step's end until all its data has been reported (Services.reporting).
_LATE_S = 1.5


@dataclass
class View:
    """Reads the node's state for the console. Caches finished jobs and completed chart steps."""

    _settings: Settings
    _overviews: Overviews
    _health: HealthReader
    _history: history.History
    _events: Events
    _jobs: JobStore
    _work: Work
    _stats_of_round: Callable[[Overview], dict[str, Any]]
    # summaries of finished jobs, by job id: the cache of Work.listed
    _ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    # the last steps sent, by step length
    _steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    _first_token: float | None = None

    def read(self) -> Sections:
        """Returns the node's state by section name. Without Redis: `now`, `problem`, `health`."""
        try:
            return {"problem": None} | self._sections()
        except Exception as error:
            if not is_transient(error):
                raise
            self._health.watch.note_away(error)
            return {
                "now": self._health.now(),
                "problem": "The node's Redis does not answer. The page shows the last known state.",
                "health": self._health_section(self._health.of(None)),
            }

    def _sections(self) -> dict[str, JsonValue]:
        now, seen = self._health.now(), self._overviews.read()
        health, workers = self._health.of(seen), list(seen.workers)
        rates = summed_by_name(seen.per_second, health.names_of(workers))
        self._look_at_steps(now)
        found: dict[str, Any] = {
            "now": now,
            "health": self._health_section(health),
            "node": self._node(seen, workers),
            "figures": self._figures(seen, health, now),
            "deployment": _deployment(seen.deployment, workers),
            "round": None,
            "workers": fleet.rows(health.seats),
            "rates": {name: round(rate, 2) for name, rate in rates.items()},
            "gpus": fleet.figures(health.seats),
            "silent": [vars(receiver) for receiver in seen.silent],
            "work": self._work.listed(self._ended),
            "events": self._events.count(),
        }
        if seen.round is not None:
            outbox = self._stats_of_round(seen)["outbox"]
            found["round"] = {"id": seen.round.record.round_id, "outbox": outbox}
        return found | {f"steps{step_s}": told for step_s, told in self._steps.items()}

    def _health_section(self, health: Health) -> dict[str, Any]:
        """Returns the section `health` without the reasons' texts, which change each second."""
        whole = self._health.answer(health)
        for reason in whole["reasons"]:
            del reason["text"]
        return whole

    def _look_at_steps(self, now: float) -> None:
        for step_s in history.STEPS:
            told = self._steps.get(step_s)
            if told is None or now >= told["first"] + (_TOLD_STEPS + 1) * step_s + _LATE_S:
                self._steps[step_s] = steps_of(self._history, step_s, now, _TOLD_STEPS)
                if step_s == _SHORTEST_S:
                    first = int(now // step_s - _CHAT_STEPS) * step_s
                    steps = self._history.read(step_s, first, _CHAT_STEPS)
                    self._first_token = history.first_token_p95(steps)

    def _node(self, seen: Overview, workers: list[WorkerRecord]) -> dict[str, Any]:
        ready = [worker for worker in workers if worker.is_ready and worker.info is not None]
        return {
            "version": VERSION,
            "state": (seen.round.record.state if seen.round is not None else RoundState.IDLE).value,
            "chat_policy": self._settings.chat_policy,
            "models": {worker.model: vars(worker.info) for worker in ready},
        }

    def _figures(self, seen: Overview, health: Health, now: float) -> dict[str, Any]:
        jobs, workers = self._jobs.count_active(), seen.workers
        chats = [worker.stats for worker in workers if "chat_active" in worker.stats]
        return {
            "nonces_per_second": round(seen.nonces_per_second, 2),
            "total_processed": seen.total_processed,
            "ready": health.n_ready,
            "workers": len(health.seats),
            "chats": sum(int(stats["chat_active"]) for stats in chats) if chats else None,
            "first_token": self._first_token,
            "queued_nonces": seen.queued_nonces,
            "jobs": vars(jobs),
            "undelivered": seen.callbacks_waiting,
            "artifacts_waiting": seen.round.outbox.waiting if seen.round is not None else 0,
            "gpu_use": fleet.mean_use(workers),
            "validations": self._jobs.validations(now),
        }


def _deployment(status: DeploymentStatus, workers: list[WorkerRecord]) -> dict[str, Any]:
    told = {"host", "state", "model", "workers", "ready", "error", "vllm_version", "left_out"}
    return {
        "state": deployment_state(status, workers).value,
        "model": status.wanted.name if status.wanted else None,
        "by": status.record.by if status.record else None,
        "asked_at": status.record.asked_at if status.record else None,
        "error": status.record.error if status.record else None,
        "hosts": [report.model_dump(mode="json", include=told) for report in status.hosts],
    }


def steps_of(
    store: history.History, step_s: int, now: float, n: int = history.SHOWN
) -> dict[str, Any]:
    """Returns chart data: the last `n` completed time steps, each `step_s` seconds long."""
    end = math.floor((now - _LATE_S) / step_s) * step_s
    first = end - n * step_s
    return {"step_s": step_s, "first": first} | _columns(store.read(step_s, first, n), step_s)


def _columns(steps: Sequence[Mapping[str, int]], step_s: int) -> dict[str, Any]:
    """Returns, for each line of the charts, a list with one value per time step."""
    names = sorted({name for step in steps for name in step if not name.startswith(":")})
    return {
        "workers": {
            name: [round(step.get(name, 0) / step_s, 2) for step in steps] for name in names
        },
        "chats": [step.get(history.CHATS, 0) for step in steps],
        "failed": [step.get(history.FAILED, 0) for step in steps],
        "active": [round(step.get(history.CHAT_MS, 0) / 1000 / step_s, 2) for step in steps],
        "first_token": [history.first_token_p95([step]) for step in steps],
    }
