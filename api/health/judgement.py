"""Derives the node's health from the records in Redis alone, so all API processes agree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from api.health.roster import AT_WORK, Seat, roster
from poc_core.callbacks import redacted
from poc_core.machine_figures import is_short_of_memory
from poc_core.records import RoundState, WorkerRecord
from poc_core.serving.deployments import DeploymentState
from poc_core.serving.places import LATELY_S
from poc_core.state.overview import Overview
from poc_core.state.parsing import BAD_CERTIFICATES

# Seconds without a heartbeat of a supervisor or chat port, or of the courier.
HOST_SILENT_S, COURIER_SILENT_S = 5.0, 3.0
# A callback receiver is reported from this many failed deliveries in a row, a worker from this many
# restarts within LATELY_S.
MANY_FAILURES, MANY_RESTARTS = 2, 3
# Seconds after a worker's end in which a round without ready workers counts as continuing.
REPLACED_S = 600.0
# Most workers that one reason names.
_MOST_NAMED = 3


class Level(StrEnum):
    """The node's condition, from good to bad."""

    OK = "ok"
    DEGRADED = "degraded"  # the node works, but a part of it does not
    DOWN = "down"  # the node computes nothing


KINDS = ("redis", "deployment", "workers", "restarts", "host", "receiver", "courier")


@dataclass(frozen=True)
class Reason:
    """A problem of the node. `text` joins `what`, the problem's duration, and `more`."""

    kind: str  # of KINDS
    level: Level
    what: str  # the phrase
    more: str = ""  # the rest, such as ": h1/gpu0 loads its model"
    since: float | None = None  # seconds since the epoch; None if unknown

    def text(self, now: float) -> str:
        """Returns the problem as a sentence without a full stop. `now`: Unix time in seconds."""
        lasts = f" for {duration(now - self.since)}" if self.since is not None else ""
        return f"{self.what}{lasts}{self.more}"


@dataclass(frozen=True)
class Snapshot:
    now: float  # seconds since the epoch
    seen: Overview | None  # None if Redis does not answer
    redis_away_since: float | None = None
    redis_trouble: str = "Redis does not answer"  # the problem, if Redis is unavailable
    worker_ttl_s: float = 15.0
    outbox_max_bytes: float = float("inf")


@dataclass(frozen=True)
class Health:
    level: Level
    reasons: Sequence[Reason]  # the worst first; empty if all is well
    since: float | None  # when the condition began; None if unknown
    seats: Sequence[Seat] = ()

    @property
    def n_ready(self) -> int:
        return sum(seat.is_ready for seat in self.seats)

    def names_of(self, workers: Sequence[WorkerRecord]) -> dict[str, str]:
        """Returns each worker's name, by worker id: the name of its seat, else of its record."""
        seated = {seat.worker.id: seat.name for seat in self.seats if seat.worker is not None}
        return {worker.id: worker.name for worker in workers} | seated

    def text(self, now: float) -> str:
        """Returns all problems in one line, or "all is well"."""
        return "; ".join(reason.text(now) for reason in self.reasons) or "all is well"


def judge(snapshot: Snapshot) -> Health:
    seen, now = snapshot.seen, snapshot.now
    if seen is None:
        since = snapshot.redis_away_since
        reason = Reason("redis", Level.DOWN, snapshot.redis_trouble, since=since)
        return Health(Level.DOWN, [reason], since)
    seats = roster(seen, now, snapshot.worker_ttl_s)
    found = [
        *_workers(seen, seats),
        *_round(seen, seats),
        *_lost(snapshot, seen),
        *_restarts(seats),
        *_chat(seats, now),
        *_hosts(snapshot, seen),
        *_receivers(snapshot, seen),
        *_courier(snapshot, seen),
    ]
    reasons = sorted(found, key=lambda reason: reason.level is not Level.DOWN)
    level = reasons[0].level if reasons else Level.OK
    times = [reason.since for reason in reasons if reason.level is level]
    known = [at for at in times if at is not None]
    if level is Level.OK:  # the condition began when the last worker became ready
        known = [max((seat.since for seat in seats if seat.since is not None), default=now)]
    return Health(level, reasons, min(known, default=None), seats)


def replacement(seen: Overview, seats: Sequence[Seat], now: float) -> str | None:
    """Returns a sentence if a generating round waits for a worker to restart, else None.

    A round waits if none of its model's workers is ready and one of them is restarted.
    """
    model = _generating(seen)
    of_model = [seat for seat in seats if seat.model == model]
    coming = [seat for seat in of_model if _comes_back(seat, now)]
    if not coming or any(seat.is_ready for seat in of_model):
        return None
    return f"The round continues when a worker is ready again: {_named(coming)}."


def _generating(seen: Overview) -> str | None:
    """Returns the model of the generating round; None if no round generates."""
    record = seen.round.record if seen.round is not None else None
    if record is None or record.state is not RoundState.GENERATING:
        return None
    return record.config.model


def _comes_back(seat: Seat, now: float) -> bool:
    """Returns True if a supervised worker stopped being ready at most REPLACED_S ago."""
    if seat.place is None or seat.state not in ("starting", "ended", "draining", "hung"):
        return False
    is_ending = seat.state in ("draining", "hung")
    return is_ending if seat.since is None else now - seat.since <= REPLACED_S


def _workers(seen: Overview, seats: Sequence[Seat]) -> Iterator[Reason]:
    missing = [seat for seat in seats if not seat.is_ready]
    if not seats:
        yield _nobody(seen)
    elif missing:
        n_ready = len(seats) - len(missing)
        times = [seat.since for seat in missing if seat.since is not None]
        since = (min(times) if n_ready else max(times)) if times else None
        level = Level.DEGRADED if n_ready else Level.DOWN
        what = f"{n_ready} of {len(seats)} workers ready"
        yield Reason("workers", level, what, f": {_named(missing)}", since)


def _round(seen: Overview, seats: Sequence[Seat]) -> Iterator[Reason]:
    """Yields a problem if the running round's model was replaced: no worker has it or loads it."""
    model, known = _generating(seen), {seat.model for seat in seats}
    if model and known and known.isdisjoint((model, "")):  # "": not known yet
        what = f"the round's model {model} has no worker"
        yield Reason("workers", Level.DEGRADED, what, ": deploy the model again, or stop the round")


def _nobody(seen: Overview) -> Reason:
    record, hosts = seen.deployment.record, seen.deployment.hosts
    if record is not None and seen.deployment.state is DeploymentState.FAILED:
        name = record.wanted.name if record.wanted else "a model"
        what, more = f"{name} could not be deployed", f": {record.error}"
        return Reason("deployment", Level.DOWN, what, more, record.settled_at)
    at = record.asked_at if record is not None else None
    if hosts and (record is None or record.wanted is None):
        more = ": `proofline deploy MODEL` starts one"
        return Reason("deployment", Level.DOWN, "no model is deployed", more, at)
    if hosts:
        return Reason("workers", Level.DOWN, "no worker is started yet", since=at)
    more = ": none is started yet, or their hosts ended; `proofline up` or `workers` starts some"
    at = max((host.last_report_at for host in seen.gone), default=None)
    return Reason("workers", Level.DOWN, "no worker is here", more, at)


def _lost(snapshot: Snapshot, seen: Overview) -> Iterator[Reason]:
    """Yields a problem if Redis lost its data (jobs, rounds) in the last LATELY_S seconds."""
    record = seen.deployment.record
    at = record.restored_at if record is not None else None
    if at is not None and snapshot.now - at < LATELY_S:
        what = f"Redis lost its records {duration(snapshot.now - at)} ago"
        more = ", jobs and rounds among them: the model is served again; find the cause"
        yield Reason("redis", Level.DEGRADED, what, more)


def _restarts(seats: Sequence[Seat]) -> Iterator[Reason]:
    for seat in seats:
        place = seat.place
        if place is not None and place.restarts_lately >= MANY_RESTARTS:
            often = f"{place.restarts_lately} times in {LATELY_S / 60:g} min"
            what = f"worker {seat.name} was restarted {often}"
            yield Reason("restarts", Level.DEGRADED, what, f", last after: {place.last_exit}")


def _chat(seats: Sequence[Seat], now: float) -> Iterator[Reason]:
    for seat in seats:
        since = seat.worker.stats.get("chat_mute_since", now) if seat.worker else now
        if now - since >= HOST_SILENT_S:
            what = f"the chat port of {seat.name} has not answered"
            yield Reason("workers", Level.DEGRADED, what, ": chat fails there", since)


def _hosts(snapshot: Snapshot, seen: Overview) -> Iterator[Reason]:
    record = seen.deployment.record
    for report in seen.deployment.hosts:
        if report.error is not None and seen.deployment.state is not DeploymentState.FAILED:
            what = f"{report.host} does not serve {report.model or 'its model'}"
            yield Reason("host", Level.DEGRADED, what, f": {report.error}")
        elif report.follows and report.state in AT_WORK and not report.ready:
            what = f"{report.host} is no part of the engine at {report.follows} yet"
            ended = next((place.last_exit for place in report.places if place.last_exit), None)
            more = f": it ended ({ended}) and is started again" if ended else ": it loads or waits"
            yield Reason("host", Level.DEGRADED, what, more)
        if report.memory is not None and is_short_of_memory(*report.memory):
            left, limit = (size / 2**30 for size in report.memory)
            more = f": {left:.1f} of {limit:.0f} GiB are left; without any the kernel ends engines"
            yield Reason("host", Level.DEGRADED, f"{report.host} is short of memory", more)
        silent_s = snapshot.worker_ttl_s - seen.left_s.get(report.id, snapshot.worker_ttl_s)
        if silent_s >= HOST_SILENT_S:
            what = f"the supervisor of {report.host} has been silent"
            more = ": a worker that ends there is not started again"
            yield Reason("host", Level.DEGRADED, what, more, snapshot.now - silent_s)
    for host in seen.gone:
        if record is not None and record.wanted and host.last_report_at > record.asked_at:
            what = f"host {host.host} has not reported"
            yield Reason("host", Level.DEGRADED, what, since=host.last_report_at)


def _receivers(snapshot: Snapshot, seen: Overview) -> Iterator[Reason]:
    current = seen.round
    if current is not None and current.outbox.waiting:
        outbox = current.outbox
        if outbox.failures >= MANY_FAILURES:
            url, error = redacted(current.record.config.url), outbox.last_error or ""
            _, answered, answer = error.partition(" answered ")
            does = "refuses" if answered else "does not answer"
            more = f", {outbox.failures} tries: {f'answered {answer}' if answered else error}"
            what = f"receiver {url} {does}"
            yield Reason("receiver", Level.DEGRADED, what, more, outbox.failing_since)
        if outbox.waiting_bytes >= snapshot.outbox_max_bytes:
            more = ": its receiver takes less than the node computes"
            yield Reason("receiver", Level.DEGRADED, "the round pauses", more)
    for silent in seen.silent:
        what = f"receiver {silent.receiver} does not answer"
        yield Reason("receiver", Level.DEGRADED, what, f", {silent.failures} tries")


def _courier(snapshot: Snapshot, seen: Overview) -> Iterator[Reason]:
    silent_s, more = seen.courier_silent_s, ": what is computed waits in Redis for its receivers"
    if silent_s is None and seen.callbacks_waiting:
        yield Reason("courier", Level.DEGRADED, "no courier runs (`proofline courier`)", more)
    elif silent_s is not None and silent_s >= COURIER_SILENT_S:
        since = snapshot.now - silent_s
        yield Reason("courier", Level.DEGRADED, "the courier has not been alive", more, since)
    elif seen.courier_trouble == BAD_CERTIFICATES:
        more = " (POC_CALLBACK_CLIENT_CERT, POC_CALLBACK_TRUSTED_CERTS): its log says why"
        what = "the courier's certificates cannot be used"
        yield Reason("courier", Level.DEGRADED, what, more)


def _named(seats: Sequence[Seat]) -> str:
    """Returns up to three workers' names with reasons, or only the reason if all have the same."""
    if len({seat.why for seat in seats}) == 1 and len(seats) > 1:
        return f"each {seats[0].why}"
    told = [f"{seat.name} {seat.why}" for seat in seats[:_MOST_NAMED]]
    rest = len(seats) - len(told)
    return ", ".join(told) + (f", and {rest} more" if rest else "")


def duration(seconds: float) -> str:
    """Formats a duration in its largest suitable unit: 12 s, 3 min, 2 h, 4 d."""
    whole = max(0, round(seconds))
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if whole >= 2 * size or (unit == "min" and whole >= size):
            return f"{whole // size} {unit}"
    return f"{whole} s"
