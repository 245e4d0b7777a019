"""The node's state as Prometheus metrics, read from Redis at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from api.chat.chats import Chats
from api.health.judgement import KINDS, Health, Level
from api.health.roster import Seat, summed_by_name
from api.version import VERSION
from poc_core.records import RoundState
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from poc_core.state.overview import Overview
from poc_core.state.registry import WorkerRegistry


def _gauge(
    name: str, documentation: str, value: float | None = None, labels: Sequence[str] | None = None
) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"proofline_{name}", documentation, value=value, labels=labels)


def _counter(
    name: str, documentation: str, value: float | None = None, labels: Sequence[str] | None = None
) -> CounterMetricFamily:
    return CounterMetricFamily(f"proofline_{name}", documentation, value=value, labels=labels)


# Counters that a worker reports (ChatGate): name -> (kind of metric, exported name, help).
_CHAT: dict[str, tuple[Any, str, str]] = {
    "chat_active": (_gauge, "chat_active", "Running chat requests."),
    "chat_total": (_counter, "chat_requests", "Chat requests served, since the worker started."),
    "chat_refused": (_counter, "chat_refused", "Chat requests answered 503 during a round."),
    "skips": (_counter, "gate_skips", "Times proofs began to wait for chat."),
    "proof_busy_s": (_counter, "proof_busy_seconds", "The engine's time that proofs took."),
}
# Validations of chats, by method: name of a worker's counter -> (exported name, help).
_VALIDATIONS = {
    "validations_{}": (
        "chat_validations",
        "Chats of other nodes scored, since the worker started.",
    ),
    "validation_{}_s": ("chat_validation_seconds", "Seconds spent on scoring other nodes' chats."),
}
_WAYS = ("pass", "steps")


@dataclass(frozen=True)
class NodeMetrics(Collector):
    """The node's Prometheus metrics. The totals of a round start at 0 with each new round."""

    _settings: Settings
    _read_health: Callable[[], tuple[Health, Overview | None]]
    _jobs: JobStore
    _outbox: Outbox
    _workers: WorkerRegistry
    _chats: Chats
    _stats_of_round: Callable[[Overview], dict[str, Any]]

    def collect(self) -> Iterable[Metric]:
        health, seen = self._read_health()
        yield from _health(health)
        if seen is None:
            return
        names = health.names_of(seen.workers)
        yield from self._of_jobs(seen)
        yield from self._of_round(seen, names)
        yield from _workers(health.seats)
        yield from _chat(health.seats)
        yield from self._chats.first_token.collect()
        yield from self._chats.whole.collect()
        yield _counter(
            "chat_deadly_requests",
            "Chat requests that ended two engines, and were refused for ten minutes.",
            self._workers.n_deadly(),
        )
        verdicts = self._jobs.verdicts()
        n_verdicts = sum(verdicts.values())
        yield _counter("validations", "Validations of others' proofs completed.", n_verdicts)
        yield _counter("frauds", "Validations that found fraud.", verdicts["fraud"])
        build = _gauge("build_info", "1; the versions that run here.", labels=["version", "vllm"])
        build.add_metric([VERSION, seen.deployment.vllm_versions], 1)
        yield build

    def _of_jobs(self, seen: Overview) -> Iterator[Metric]:
        settings = self._settings
        yield _counter("nonces", "Nonces computed, for jobs and rounds.", seen.total_processed)
        yield _gauge(
            "nonces_per_second", "Nonces per second, mean of the last 10 s.", seen.nonces_per_second
        )
        yield _gauge("queued_nonces", "Nonces accepted and not yet computed.", seen.queued_nonces)
        yield _gauge("queued_nonces_limit", "POC_MAX_QUEUED_NONCES.", settings.max_queued_nonces)
        yield _gauge("jobs_limit", "Most jobs (POC_MAX_QUEUED_NONCES / 5).", settings.max_jobs)
        counts = self._jobs.count_active()
        by_status = _gauge("jobs", "Jobs that have not ended.", labels=["status"])
        by_status.add_metric(["queued"], counts.queued)
        by_status.add_metric(["running"], counts.running)
        yield by_status
        yield _gauge("jobs_waiting_for_chat", "Jobs that wait for chat.", counts.waiting_for_chat)
        waiting = self._outbox.n_jobs()
        yield _gauge("job_callbacks_waiting", "Jobs with an undelivered callback.", waiting)
        yield _gauge(
            "silent_receivers", "Receivers that answer nothing, at most 20.", len(seen.silent)
        )

    def _of_round(self, seen: Overview, names: Mapping[str, str]) -> Iterator[Metric]:
        current = seen.round.record if seen.round is not None else None
        states = _gauge("round_state", "1 for the state the node is in.", labels=["state"])
        now = current.state if current else RoundState.IDLE
        for one in RoundState:
            states.add_metric([one.value], one is now)
        yield states
        if current is None:
            return
        stats = self._stats_of_round(seen)
        outbox = stats["outbox"]
        labels = ["worker", "model"]
        totals = _counter("round_nonces", "Nonces of the round computed.", labels=labels)
        rates = _gauge("round_nonces_per_second", "Nonces/s, mean of the last 10 s.", labels=labels)
        for family, figure in ((totals, "total_processed"), (rates, "nonces_per_second")):
            by_id = {worker: numbers[figure] for worker, numbers in stats["workers"].items()}
            for name, value in summed_by_name(by_id, names).items():
                family.add_metric([name, current.config.model], value)
            yield family
        yield _counter(
            "round_reported", "Nonces to report: artifacts, or valid distances.", current.n_valid
        )
        yield _counter(
            "round_excluded_nonces", "Nonces without a finite state.", current.n_excluded
        )
        yield _gauge(
            "round_seconds",
            "Seconds from the round's start until now or its end.",
            stats["elapsed_seconds"],
        )
        yield _gauge("outbox_waiting", "Artifacts not delivered yet.", stats["artifacts_waiting"])
        yield _gauge("outbox_bytes", "Redis' memory for undelivered artifacts.", outbox["bytes"])
        yield _gauge("outbox_limit", "POC_OUTBOX_MAX_BYTES.", outbox["limit_bytes"])
        yield _gauge("outbox_full", "1 while the round pauses at a limit.", outbox["full"])
        yield _gauge("outbox_failures", "Deliveries that failed in a row.", outbox["failures"])
        yield _counter("outbox_delivered", "Artifacts delivered.", stats["artifacts_delivered"])
        yield _counter(
            "outbox_dropped", "Artifacts dropped (POC_CALLBACK_MAX_RETRIES).", outbox["dropped"]
        )


def _health(health: Health) -> Iterator[Metric]:
    levels = _gauge("health", "1 for the node's health; /readyz has the reasons.", labels=["level"])
    for level in Level:
        levels.add_metric([level.value], level is health.level)
    yield levels
    reasons = _gauge("health_reasons", "Troubles of the node's health, by kind.", labels=["kind"])
    for kind in KINDS:
        reasons.add_metric([kind], sum(reason.kind == kind for reason in health.reasons))
    yield reasons


def _workers(seats: Sequence[Seat]) -> Iterator[Metric]:
    yield _gauge("workers", "Workers that the node has or should have.", len(seats))
    labels = ["worker", "model", "engine", "host"]
    up = _gauge("worker_up", "1 for a worker that is ready, 0 for one that is not.", labels=labels)
    restarts = _counter(
        "worker_restarts", "Restarts of a worker by its supervisor.", labels=["worker"]
    )
    exits = _gauge(
        "worker_last_exit_timestamp_seconds",
        "When and how a worker last ended.",
        labels=["worker", "reason"],
    )
    for seat in seats:
        up.add_metric([seat.name, seat.model, seat.engine, seat.host], seat.is_ready)
        if seat.place is not None:
            restarts.add_metric([seat.name], seat.place.restarts)
            if seat.place.last_exit is not None:
                exits.add_metric([seat.name, seat.place.last_exit], seat.place.last_exit_at or 0)
    yield from (up, restarts, exits)


def _chat(seats: Sequence[Seat]) -> Iterator[Metric]:
    served = [(seat.name, seat.worker) for seat in seats if seat.worker is not None]
    for key, (kind, metric, documentation) in _CHAT.items():
        family = kind(metric, documentation, labels=["worker", "model"])
        for name, worker in served:
            value = worker.stats.get(key)
            if isinstance(value, int | float):
                family.add_metric([name, worker.model], value)
        yield family
    for key, (metric, documentation) in _VALIDATIONS.items():
        by_way = _counter(metric, documentation, labels=["worker", "model", "way"])
        for name, worker in served:
            for way in _WAYS:
                value = worker.stats.get(key.format(way))
                if value is not None:
                    by_way.add_metric([name, worker.model, way], value)
        yield by_way
