"""The deployment in Redis, and the hosts that follow it.

The record is one key without a TTL: a node that was off for a month restarts with its model. A
host's record expires worker_ttl_s after its last report.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from redis import Redis

from poc_core.errors import DeployedError, NoHostError
from poc_core.machine_figures import MachineFigures
from poc_core.serving.deployments import (
    KEPT_S,
    Deployment,
    DeploymentRecord,
    DeploymentStatus,
    HostLogs,
    HostReport,
    HostState,
)
from poc_core.settings import Settings
from poc_core.state import keys, scripts
from poc_core.state.client import server_clock
from poc_core.state.past.events import Events
from poc_core.state.unreadable import answers, readable

T = TypeVar("T", bound=BaseModel)

MOST_REASON_CHARS = 300  # of the error text for an unreadable record
# Seconds for which a machine's figures are reported: those of a hung driver must expire.
FIGURES_S = 60


class DeploymentStore:
    """All operations on the deployment, each atomic in Redis and safe to repeat."""

    def __init__(
        self, redis: Redis, settings: Settings, clock: Callable[[], float] | None = None
    ) -> None:
        """`clock`: Redis' if None."""
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._settings = settings
        self._clock = clock or server_clock(redis)
        self.events = Events(redis, self._clock)
        self._deploy = scripts.load(redis, "deploy")
        self._withdraw = scripts.load(redis, "withdraw")
        self._report = scripts.load(redis, "report_host")
        self._restore = scripts.load(redis, "restore_deployment")

    # Clients: deploy, withdraw, look.

    def deploy(self, wanted: Deployment) -> int:
        """Stores a deployment for every host, also after a failed one; returns its generation.

        DeployedError: a model runs or starts. NoHostError: no host could run the model.
        """
        outcome, generation = self._set(wanted, "request")
        if outcome == "deployed":
            raise DeployedError("A model is deployed already; send POST /api/v1/stop first.")
        if outcome == "no_host":
            raise NoHostError(
                "No host is here to run a model: start `proofline up` or `proofline workers` on"
                " one."
            )
        return generation

    def withdraw(self, keeps: bool = False) -> int:
        """Stores that nothing shall run; returns the generation.

        `keeps`: hosts keep loading engines for KEPT_S, in case the same model is deployed.
        """
        return int(self._withdraw([keys.DEPLOYMENT, keys.MODELS], [self._clock(), int(keeps)]))

    def status(self) -> DeploymentStatus:
        return DeploymentStatus(self.read(), self.hosts())

    def read(self) -> DeploymentRecord | None:
        return deployment_record(self._redis.hgetall(keys.DEPLOYMENT))

    def hosts(self) -> list[HostReport]:
        """Returns the live hosts' reports, by host name."""
        ids = self._host_ids()
        with self._redis.pipeline(transaction=False) as pipe:
            for host_id in ids:
                pipe.hget(keys.host(host_id), "report")
            found = _readable(HostReport, "report of host", ids, answers(pipe))
        return sorted(found, key=lambda report: (report.host, report.id))

    def keeping(self) -> set[str]:
        """Returns ids of hosts that keep loading engines of a withdrawn model."""
        record = self.read()
        if record is None or not record.cancelled:
            return set()
        return {host.id for host in self.hosts() if host.state is HostState.KEEPING}

    def logs(self) -> list[HostLogs]:
        """Returns the last log lines of live hosts' workers, by host name."""
        ids = self._host_ids()
        found = self._redis.mget(map(keys.host_logs, ids)) if ids else []
        return sorted(_readable(HostLogs, "logs of host", ids, found), key=lambda one: one.host)

    def machines(self) -> list[MachineFigures]:
        """Returns the live hosts' machine figures by host name; the latest per name."""
        ids = self._host_ids()
        found = self._redis.mget(map(keys.host_machine, ids)) if ids else []
        told = _readable(MachineFigures, "machine of host", ids, found)
        by_host = {one.host: one for one in sorted(told, key=lambda one: one.read_at)}
        return [by_host[host] for host in sorted(by_host)]

    def _host_ids(self) -> list[str]:
        return [name.decode(errors="replace") for name in self._redis.zrange(keys.HOSTS, 0, -1)]

    def elapsed_s(self, record: DeploymentRecord) -> float:
        """Returns seconds from the request to serving or failure, or to now."""
        return (record.settled_at or self._clock()) - record.asked_at

    # Hosts: begin, report, leave.

    def deploy_first(self, wanted: Deployment, host_id: str) -> bool:
        """Deploys the --model with which a host starts. False if another deployment has priority.

        A requested one has, unless withdrawn, or failed with no other host alive. So has the
        --model of another live host.
        """
        return self._set(wanted, "start", host_id)[0] == "ok"

    def restore(self, known: DeploymentRecord, host: str) -> bool:
        """Restores the record that Redis lost, as the host of that name knew it.

        False if a request has changed it since, or another host knew a newer one.
        """
        wanted, name, engines = "", "", None
        if known.wanted is not None:
            wanted, name = known.wanted.model_dump_json(exclude_unset=True), known.wanted.name
            engines = known.engines
        fields: dict[str, Any] = {"wanted": wanted, "by": known.by, "asked_at": known.asked_at}
        fields["engines"] = engines
        fields |= {"settled_at": known.settled_at, "error": known.error}
        args: list[Any] = [known.generation, self._clock(), host, name]
        args += [part for item in fields.items() if item[1] is not None for part in item]
        return bool(self._restore([keys.DEPLOYMENT], args))

    def report(self, report: HostReport) -> None:
        """Stores a host's progress. If all live hosts failed, so does the deployment: its error."""
        args: list[Any] = [report.id, report.generation, report.state.value, report.error or ""]
        args += [
            report.model_dump_json(),
            self._clock(),
            self._settings.worker_ttl_s,
            self._settings.job_ttl_sec,
            report.model or "",
            report.engine_at,
        ]
        self._report([keys.DEPLOYMENT, keys.HOSTS, keys.host(report.id)], args)

    def store_logs(self, host_id: str, logs: HostLogs) -> None:
        """Stores a host's last worker log lines; they expire with its reports."""
        self._redis.set(
            keys.host_logs(host_id), logs.model_dump_json(), ex=self._settings.worker_ttl_s
        )

    def store_machine(self, host_id: str, figures: MachineFigures) -> None:
        """Stores a machine's sensor figures, apart from the widely read heartbeats."""
        self._redis.set(keys.host_machine(host_id), figures.model_dump_json(), ex=FIGURES_S)

    def leave(self, host_id: str) -> None:
        """Deletes a host that stops: nobody waits for it."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.host(host_id), keys.host_logs(host_id), keys.host_machine(host_id))
            pipe.zrem(keys.HOSTS, host_id)
            pipe.execute()
        if not self.hosts():  # without live hosts, none is reported as missing
            self._redis.delete(keys.HOSTS)

    def drop_silent(self) -> None:
        """Limits hosts' lives to worker_ttl_s from now, unless they report."""
        for host_id in self._host_ids():
            self._redis.expire(keys.host(host_id), self._settings.worker_ttl_s)

    def _set(
        self, wanted: Deployment, by: Literal["start", "request"], host_id: str = ""
    ) -> tuple[str, int]:
        args: list[Any] = [
            wanted.model_dump_json(exclude_unset=True),
            by,
            self._clock(),
            uuid.uuid4().hex,
            host_id,
            wanted.name,
            KEPT_S,
        ]
        outcome, generation = self._deploy([keys.DEPLOYMENT, keys.HOSTS, keys.MODELS], args)
        return outcome.decode(), int(generation)


def deployment_record(found: Mapping[bytes, bytes]) -> DeploymentRecord | None:
    """Parses a deployment's hash; None if nothing was ever deployed."""
    raw = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in found.items()
    }
    if not raw:
        return None
    try:
        return _record(raw)
    except (AttributeError, KeyError, RecursionError, ValueError) as error:
        return _unreadable(raw, error)


def _readable(
    record: type[T], name: str, ids: Sequence[str], found: Sequence[bytes | None]
) -> list[T]:
    """Parses hosts' records of one kind; skips missing and unreadable records."""
    told = zip(ids, found, strict=True)
    read = (
        readable(f"{name} {host_id!r}", partial(record.model_validate_json, raw))
        for host_id, raw in told
        if raw is not None
    )
    return [one for one in read if one is not None]


def _record(raw: Mapping[str, str]) -> DeploymentRecord:
    """Parses a hash. Foreign content may raise any error."""
    wanted = json.loads(raw["wanted"]) if raw["wanted"] else None
    if wanted is not None:  # earlier versions wrote unset options as null
        said = {name: value for name, value in wanted.items() if value is not None}
        wanted = Deployment.model_validate(said)
    return DeploymentRecord(
        generation=int(raw["generation"]),
        wanted=wanted,
        by="start" if raw["by"] == "start" else "request",
        asked_at=float(raw["asked_at"]),
        settled_at=float(raw["settled_at"]) if "settled_at" in raw else None,
        error=raw.get("error"),
        restored_at=float(raw["restored_at"]) if "restored_at" in raw else None,
        engines=int(raw.get("engines", raw["generation"])),
        cancelled="loading" in raw,
    )


def _unreadable(raw: Mapping[str, str], error: Exception) -> DeploymentRecord:
    """Returns a record that says why nothing runs, until the hash is written again."""
    generation = raw.get("generation", "")
    why = " ".join(str(error).split())[:MOST_REASON_CHARS]
    return DeploymentRecord(
        generation=int(generation) if re.fullmatch("[0-9]{1,12}", generation) else 0,
        wanted=None,
        by="request",
        asked_at=0.0,
        settled_at=0.0,
        error=f"The record {keys.DEPLOYMENT} cannot be read ({why}); send POST /api/v1/stop, then"
        " deploy a model again.",
    )
