"""The node's state as Prometheus metrics, read from Redis at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from api.proofs import round_control
from api.services import Services
from api.version import VERSION
from poc_core.records import RoundState, WorkerRecord
from poc_core.state.overview import Overview

# A worker's own counters (ChatGate): name -> (kind of metric, name here, help).
_CHAT = {
    "chat_active": (GaugeMetricFamily, "proofline_chat_active", "Chat requests under way."),
    "chat_total": (
        CounterMetricFamily,
        "proofline_chat_requests",
        "Chat requests served, since the worker started.",
    ),
    "chat_refused": (
        CounterMetricFamily,
        "proofline_chat_refused",
        "Chat requests answered 503 during a round.",
    ),
    "skips": (CounterMetricFamily, "proofline_gate_skips", "Times proofs began to wait for chat."),
    "proof_busy_s": (
        CounterMetricFamily,
        "proofline_proof_busy_seconds",
        "The engine's time that proofs took.",
    ),
}
# Validations of chats, by way: name in a worker's counters -> (name here, help).
_VALIDATIONS = {
    "validations_{}": (
        "proofline_chat_validations",
        "Chats of other nodes scored, since the worker started.",
    ),
    "validation_{}_s": ("proofline_chat_validation_seconds", "The time that scoring them took."),
}
_WAYS = ("pass", "steps")


class NodeMetrics(Collector):
    """Collector of the node's metrics; a round's totals are the last round's, and begin anew."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        seen = self._services.overviews.read()
        yield from self._jobs(seen)
        yield from self._round(seen)
        yield from _workers(seen.workers)
        yield from _chat(seen.workers)
        yield from self._services.gateway.times.collect()
        yield from _verdicts(self._services.jobs.verdicts())
        yield _build(self._services)

    def _jobs(self, seen: Overview) -> Iterator[Metric]:
        settings = self._services.settings
        yield _counter(
            "proofline_nonces", "Nonces computed, for jobs and rounds.", seen.total_processed
        )
        yield _gauge(
            "proofline_nonces_per_second",
            "The same, mean of the last 10 s.",
            seen.nonces_per_second,
        )
        yield _gauge(
            "proofline_queued_nonces", "Nonces accepted and not yet computed.", seen.queued_nonces
        )
        yield _gauge(
            "proofline_queued_nonces_limit", "POC_MAX_QUEUED_NONCES.", settings.max_queued_nonces
        )
        yield _gauge("proofline_jobs_limit", "A fifth of POC_MAX_QUEUED_NONCES.", settings.max_jobs)
        counts = self._services.jobs.count_active()
        by_status = GaugeMetricFamily(
            "proofline_jobs", "Jobs that have not ended.", labels=["status"]
        )
        by_status.add_metric(["queued"], counts.queued)
        by_status.add_metric(["running"], counts.running)
        yield by_status
        yield _gauge(
            "proofline_jobs_waiting_for_chat",
            "Of these; queued or running.",
            counts.waiting_for_chat,
        )
        waiting = self._services.outbox.n_jobs()
        yield _gauge(
            "proofline_job_callbacks_waiting",
            "Jobs with a url, until that has their callback.",
            waiting,
        )
        yield _gauge(
            "proofline_silent_receivers",
            "Receivers that answer nothing, at most 20.",
            len(seen.silent),
        )

    def _round(self, seen: Overview) -> Iterator[Metric]:
        current = seen.round.record if seen.round is not None else None
        states = GaugeMetricFamily(
            "proofline_round_state", "1 for the state the node is in.", labels=["state"]
        )
        for state in RoundState:
            states.add_metric(
                [state.value], state is (current.state if current else RoundState.IDLE)
            )
        yield states
        if current is None:
            return
        stats = round_control.stats_of(self._services, seen)
        outbox = stats["outbox"]
        labels = ["worker", "model"]
        totals = CounterMetricFamily(
            "proofline_round_nonces", "Nonces of the round computed.", labels=labels
        )
        rates = GaugeMetricFamily(
            "proofline_round_nonces_per_second", "The same, mean of the last 10 s.", labels=labels
        )
        for worker, numbers in stats["workers"].items():
            totals.add_metric([worker, current.config.model], numbers["total_processed"])
            rates.add_metric([worker, current.config.model], numbers["nonces_per_second"])
        yield totals
        yield rates
        yield _counter(
            "proofline_round_reported",
            "Nonces to report: artifacts, or valid distances.",
            current.n_valid,
        )
        yield _counter(
            "proofline_round_excluded_nonces", "Nonces without a finite state.", current.n_excluded
        )
        yield _gauge(
            "proofline_round_seconds",
            "Since the round began, until it stopped.",
            stats["elapsed_seconds"],
        )
        yield _gauge(
            "proofline_outbox_waiting",
            "Artifacts the receiver is still to get.",
            stats["artifacts_waiting"],
        )
        yield _gauge("proofline_outbox_bytes", "Redis' memory that they take.", outbox["bytes"])
        yield _gauge("proofline_outbox_limit", "POC_OUTBOX_MAX_BYTES.", outbox["limit_bytes"])
        yield _gauge(
            "proofline_outbox_full", "1 while the round pauses at a limit.", outbox["full"]
        )
        yield _gauge(
            "proofline_outbox_failures", "Deliveries that failed in a row.", outbox["failures"]
        )
        yield _counter(
            "proofline_outbox_delivered",
            "Artifacts the receiver has.",
            stats["artifacts_delivered"],
        )
        yield _counter(
            "proofline_outbox_dropped",
            "Artifacts given up (POC_CALLBACK_MAX_RETRIES).",
            outbox["dropped"],
        )


def _workers(workers: Sequence[WorkerRecord]) -> Iterator[Metric]:
    labels = ["worker", "model", "engine", "host"]
    up = GaugeMetricFamily(
        "proofline_worker_up", "1 for a worker that is ready, 0 while it loads.", labels=labels
    )
    for worker in workers:
        up.add_metric([worker.id, worker.model, worker.engine, worker.host], worker.is_ready)
    yield up


def _chat(workers: Sequence[WorkerRecord]) -> Iterator[Metric]:
    for key, (kind, name, documentation) in _CHAT.items():
        family = kind(name, documentation, labels=["worker", "model"])
        for worker in workers:
            value = worker.stats.get(key)
            if isinstance(value, int | float):
                family.add_metric([worker.id, worker.model], value)
        yield family
    for key, (name, documentation) in _VALIDATIONS.items():
        by_way = CounterMetricFamily(name, documentation, labels=["worker", "model", "way"])
        for worker in workers:
            for way in _WAYS:
                value = worker.stats.get(key.format(way))
                if value is not None:
                    by_way.add_metric([worker.id, worker.model, way], value)
        yield by_way


def _verdicts(found: Mapping[str, int]) -> Iterator[Metric]:
    yield _counter(
        "proofline_validations", "Validations of others' proofs completed.", sum(found.values())
    )
    yield _counter("proofline_frauds", "Of these, those that found fraud.", found["fraud"])


def _build(services: Services) -> Metric:
    hosts = services.deployments.hosts()
    vllm = ", ".join(sorted({host.vllm_version for host in hosts if host.vllm_version}))
    about = GaugeMetricFamily(
        "proofline_build_info", "1; the versions that run here.", labels=["version", "vllm"]
    )
    about.add_metric([VERSION, vllm], 1)
    return about


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)
