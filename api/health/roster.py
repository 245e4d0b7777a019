"""Lists the node's seats. A seat is a worker that runs or should run, across its restarts."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from poc_core.records import SILENT_S, WorkerRecord
from poc_core.serving.deployments import DeploymentState, DeploymentStatus, HostReport, HostState
from poc_core.serving.places import WorkerPlace, name_of
from poc_core.state.overview import Overview

# States of hosts whose workers should be ready now or soon.
AT_WORK = (HostState.STARTING, HostState.SERVING)


@dataclass(frozen=True)
class Seat:
    """A worker that runs or should run, across its restarts. `since` is seconds since the epoch."""

    name: str  # host1/gpu0-1; equal names get a suffix such as #a1b2c3
    host: str
    model: str
    engine: str
    # the state that the worker reports, or "silent", "ended", "given up"
    state: str
    since: float | None  # when the seat became ready or stopped being ready; None if unknown
    worker: WorkerRecord | None  # record of the running process
    place: WorkerPlace | None  # None if no supervisor runs the worker
    of: str  # id of the seat's supervisor; the worker's id if there is no supervisor

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def why(self) -> str:
        """Returns why the worker is not ready: a phrase that continues "host1/gpu0 ..."."""
        if self.state == "given up":
            said = (self.place.gave_up if self.place else None) or ""
            return said.removeprefix(f"{self.name} ") or "is given up"
        if self.state == "silent":
            return "gives no sign of life"
        if self.state == "hung":
            return "has an engine that hangs"
        if self.state == "draining":
            return "ends"
        if self.place is not None and self.place.last_exit is not None:
            return f"ended ({self.place.last_exit}) and is started again"
        return "loads its model" if self.state == "starting" else "is not registered in Redis"


def roster(seen: Overview, now: float, ttl_s: float) -> list[Seat]:
    """Returns the seats (expected workers) of hosts that start or serve a model, sorted by name.

    Includes workers without a supervisor. An engine over several hosts has one seat, on its head
    host. `ttl_s`: seconds for which a worker's record is kept after a heartbeat.
    """
    silent_s = {name: max(0.0, ttl_s - left_s) for name, left_s in seen.left_s.items()}
    by_process = {(worker.host_id, worker.pid): worker for worker in seen.workers}
    found = [
        _placed(report, place, by_process.get((report.id, place.pid or 0)), silent_s, now)
        for report in seen.deployment.hosts
        if report.state in AT_WORK and not report.follows
        for place in report.places
    ]
    supervised = {report.id for report in seen.deployment.hosts}
    found += [
        _lone(worker, silent_s, now)
        for worker in seen.workers
        if worker.host_id not in supervised and worker.state != "draining"
    ]
    return sorted(_distinct(found), key=lambda seat: seat.name)


def _placed(
    report: HostReport,
    place: WorkerPlace,
    worker: WorkerRecord | None,
    silent_s: Mapping[str, float],
    now: float,
) -> Seat:
    since: float | None = place.since
    silence_s = silent_s.get(worker.id, 0.0) if worker is not None else 0.0
    if place.gave_up is not None:
        state = "given up"
    elif worker is not None and worker.is_ready and silence_s >= SILENT_S:
        state, since = "silent", now - silence_s
    elif worker is not None:
        state = worker.state
        if worker.state == "ready":  # perhaps the supervisor has not noticed it yet
            since = place.since if place.is_ready else None
        elif place.is_ready:
            since = None
    # the worker has not registered again, or the supervisor has not noticed its end
    elif place.is_ready:
        state, since = "ended", None
    else:
        state = "starting" if place.pid is not None else "ended"
    about = (place.name, report.host, report.model or "", report.engine)
    return Seat(*about, state, since, worker, place, report.id)


def _lone(worker: WorkerRecord, silent_s: Mapping[str, float], now: float) -> Seat:
    silence_s = silent_s.get(worker.id, 0.0)
    state, since = str(worker.state), worker.started_at
    if worker.is_ready and silence_s >= SILENT_S:
        state, since = "silent", now - silence_s
    about = (worker.name, worker.host, worker.model, worker.engine)
    return Seat(*about, state, since, worker, None, worker.id)


def _distinct(seats: list[Seat]) -> Iterator[Seat]:
    """Makes the seats' names unique. Omits a silent worker if a live worker has its name."""
    alive = {seat.name for seat in seats if seat.state != "silent"}
    kept = [
        seat for seat in seats if seat.place or seat.state != "silent" or seat.name not in alive
    ]
    counts = Counter(seat.name for seat in kept)
    for seat in kept:
        if counts[seat.name] == 1:
            yield seat
        else:
            yield replace(seat, name=f"{seat.name}#{seat.of[-6:]}")


def deployment_state(status: DeploymentStatus, workers: Sequence[WorkerRecord]) -> DeploymentState:
    """Returns the deployment's state as the hosts report it, else as derived from the workers."""
    if status.hosts or status.state is DeploymentState.FAILED:
        return status.state
    states = {worker.state for worker in workers}
    if "ready" in states:
        return DeploymentState.RUNNING
    return DeploymentState.STARTING if "starting" in states else DeploymentState.IDLE


def summed_by_name(values: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """Sums values by worker name, because a restart changes the worker's id but not its name."""
    found: dict[str, float] = defaultdict(int)
    for worker_id, value in values.items():
        found[names.get(worker_id) or name_of(worker_id)] += value
    return dict(sorted(found.items()))
