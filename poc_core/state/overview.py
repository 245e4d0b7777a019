"""The node's round, queue, receivers and workers, read by one script for many polling clients.
Separate reads would be slow, because after each read a thread waits for Python's global lock.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poc_core import records
from poc_core.serving import deployments
from poc_core.state import keys, scripts
from poc_core.state.parsing import (
    MOST_LOOKED_AT,
    RECORD_FIELDS,
    OutboxStatus,
    SilentReceiver,
    deployment_record,
    readable,
    round_record,
    spared,
    worker_records,
)

# Whole seconds over which current rates are averaged.
RATE_WINDOW_S = 10


@dataclass(frozen=True)
class RoundRates:
    """The nonces that each worker (by id) computed for a round, in total and per second. Rates are
    means over RATE_WINDOW_S, or over the round's age if the round is younger.
    """

    totals: Mapping[str, int]
    per_second: Mapping[str, float]


@dataclass(frozen=True)
class CurrentRound:
    """The round stored last, in any state."""

    record: records.RoundRecord
    rates: RoundRates
    # nonces without a finite state, the latest last; if very many, only the last ones
    excluded: Sequence[int]
    outbox: OutboxStatus


@dataclass(frozen=True)
class GoneHost:
    """A host that stopped reporting, but was not shut down properly."""

    host: str  # its name
    last_report_at: float  # seconds since the epoch


@dataclass(frozen=True)
class Overview:
    """A consistent snapshot of the node's state, read by one Redis script."""

    round: CurrentRound | None  # None if there was no round, or it expired
    workers: Sequence[records.WorkerRecord]  # alive, starting or ready, by id
    silent: Sequence[SilentReceiver]  # receivers that did not answer BREAKS_AT tries in a row
    callbacks_waiting: int  # rounds and jobs, ended or not, with undelivered data
    queued_nonces: int  # accepted but uncomputed, over all jobs
    total_processed: int  # nonces of jobs and rounds
    # worker id -> nonces per second, mean over the last RATE_WINDOW_S
    per_second: Mapping[str, float]
    deployment: deployments.DeploymentStatus
    gone: Sequence[GoneHost]  # hosts that reported within the last hour and neither live nor left
    # worker or host id -> seconds until its record expires without another sign of life
    left_s: Mapping[str, float]
    # Seconds since a courier's last sign of life; None if no courier ran within a day, or it left.
    courier_silent_s: float | None
    courier_trouble: str  # the courier's last report; empty if none

    @property
    def nonces_per_second(self) -> float:
        """The nonces per second of all workers together."""
        return sum(self.per_second.values())


class Overviews(scripts.BaseStore):
    """The reader of overviews, which changes nothing in Redis."""

    _read = scripts.of_store("read_overview")

    def read(self) -> Overview:
        second = int(self._clock())
        names = [
            keys.CURRENT_ROUND,
            keys.WORKERS,
            keys.RECEIVERS,
            keys.OUTBOX_DUE,
            keys.QUEUED_NONCES,
            keys.STATS_TOTAL,
            keys.DEPLOYMENT,
            keys.HOSTS,
            keys.COURIER,
        ]
        args: list[Any] = [second, RATE_WINDOW_S, MOST_LOOKED_AT, *RECORD_FIELDS]
        found: Any = self._read(names, args)
        queued, n_due, total, lately, workers, receivers, current, *others = found
        wanted, hosts, courier, trouble = others
        reports = [report for report in map(_report, hosts) if report is not None]
        left_ms = [(name, ms) for name, _, ms in workers] + [(name, ms) for name, *_, ms in hosts]
        return Overview(
            round=_current(second, *current) if current else None,
            workers=worker_records((name, raw) for name, raw, _ in workers),
            silent=spared(receivers),
            callbacks_waiting=int(n_due),
            queued_nonces=max(0, int(queued)),
            total_processed=int(total),
            per_second={name: n / RATE_WINDOW_S for name, n in _counts(lately).items()},
            deployment=deployments.DeploymentStatus(
                deployment_record(_hash(wanted)),
                sorted(reports, key=lambda report: (report.host, report.id)),
            ),
            gone=_gone(hosts, {report.host for report in reports}),
            left_s={name.decode(errors="replace"): int(ms) / 1000 for name, ms in left_ms},
            courier_silent_s=keys.COURIER_KNOWN_S - int(courier) / 1000
            if int(courier) >= 0
            else None,
            courier_trouble=trouble.decode(errors="replace"),
        )


def _current(
    second: int,
    round_id: bytes,
    round: list[bytes | None],
    totals: bytes,
    lately: bytes,
    outbox: list[bytes],
    excluded: list[bytes],
) -> CurrentRound | None:
    record = round_record(round_id.decode(), round)
    if record is None:
        return None
    # A young round is averaged over its age, but over at least a second.
    began = record.started_at if record.started_at is not None else second
    window_s = min(RATE_WINDOW_S, max(1.0, second - began))
    rates = {worker: n / window_s for worker, n in _counts(lately).items()}
    status = readable(f"outbox {round_id.decode()!r}", lambda: OutboxStatus.of(_hash(outbox)))
    return CurrentRound(
        record,
        RoundRates(_counts(totals), rates),
        [int(nonce) for nonce in excluded],
        status or OutboxStatus.of({}),
    )


def _report(found: Sequence[Any]) -> deployments.HostReport | None:
    name, _, raw, _ = found
    return (
        readable(f"host {name!r}", lambda: deployments.HostReport.model_validate_json(raw))
        if raw
        else None
    )


def _gone(hosts: Sequence[Sequence[Any]], living: Collection[str]) -> list[GoneHost]:
    """Returns the hosts that do not report any more, except hosts whose name is in `living`.
    `hosts`: from read_overview.lua. A host's id, such as host1-4242-3fa9c1, begins with the host's
    name.
    """
    found = {
        name.decode(errors="replace").rsplit("-", 2)[0]: float(at)
        for name, at, raw, _ in hosts
        if not raw
    }
    return [GoneHost(host, at) for host, at in sorted(found.items()) if host not in living]


def _hash(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _counts(raw: bytes) -> dict[str, int]:
    return {name: int(n) for name, n in json.loads(raw.decode(errors="replace")).items()}
