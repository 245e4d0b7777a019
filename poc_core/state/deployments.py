"""The deployment in Redis, and the hosts that follow it.

The record of the deployment is one key without a TTL: a node that was off for a month restarts with
its model. A host's record expires worker_ttl_s after the host's last report.
"""

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from redis import Redis

from poc_core import errors
from poc_core.machine_figures import MachineFigures
from poc_core.serving import deployments
from poc_core.settings import Settings
from poc_core.state import keys, scripts
from poc_core.state.client import Store, server_clock
from poc_core.state.events import Events
from poc_core.state.parsing import answers, deployment_record, readable

T = TypeVar("T", bound=BaseModel)

# TTL in seconds of a machine's figures. They expire if the driver hangs.
FIGURES_S = 60


class DeploymentStore(Store):
    """The store of the deployment and of its hosts. Each operation is atomic and safe to repeat."""

    _deploy = scripts.of_store("deploy")
    _withdraw = scripts.of_store("withdraw")
    _report = scripts.of_store("report_host")
    _restore = scripts.of_store("restore_deployment")

    def __init__(
        self, redis: Redis, settings: Settings, clock: Callable[[], float] | None = None
    ) -> None:
        """`clock`: returns seconds since the epoch; None means the clock of Redis' machine."""
        super().__init__(redis, settings, clock or server_clock(redis))
        self.events = Events(redis, self._clock)

    # Clients: deploy, withdraw, look.

    def deploy(self, wanted: deployments.Deployment) -> int:
        """Stores the deployment that every host must follow. Returns its generation. DeployedError
        if a model already runs or starts. NoHostError if no host is live.
        """
        outcome, generation = self._set(wanted, "request")
        if outcome == "deployed":
            raise errors.DeployedError("A model is deployed already; send POST /api/v1/stop first.")
        if outcome == "no_host":
            raise errors.NoHostError(
                "No host is here to run a model: start `proofline up` or `proofline workers` on"
                " one."
            )
        return generation

    def withdraw(self, keeps: bool = False) -> int:
        """Withdraws the deployment, so that no model runs. Returns the new generation. `keeps`:
        True to let hosts continue to load engines for KEPT_S, in case the model is deployed again.
        """
        return int(self._withdraw([keys.DEPLOYMENT, keys.MODELS], [self._clock(), int(keeps)]))

    def status(self) -> deployments.DeploymentStatus:
        return deployments.DeploymentStatus(self.read(), self.hosts())

    def read(self) -> deployments.DeploymentRecord | None:
        return deployment_record(self._redis.hgetall(keys.DEPLOYMENT))

    def hosts(self) -> list[deployments.HostReport]:
        """Returns the reports of the live hosts, sorted by host name."""
        ids = self._host_ids()
        with self._redis.pipeline(transaction=False) as pipe:
            for host_id in ids:
                pipe.hget(keys.host(host_id), "report")
            found = _readable(deployments.HostReport, "report of host", ids, answers(pipe))
        return sorted(found, key=lambda report: (report.host, report.id))

    def keeping(self) -> set[str]:
        """Returns the ids of hosts that continue to load engines of a withdrawn model."""
        record = self.read()
        if record is None or not record.cancelled:
            return set()
        return {host.id for host in self.hosts() if host.state is deployments.HostState.KEEPING}

    def logs(self) -> list[deployments.HostLogs]:
        """Returns the last log lines of the live hosts' workers, sorted by host name."""
        found = self._of_hosts(deployments.HostLogs, "logs of host", keys.host_logs)
        return sorted(found, key=lambda one: one.host)

    def machines(self) -> list[MachineFigures]:
        """Returns the latest measurements of each live host's machine, sorted by host name."""
        found = self._of_hosts(MachineFigures, "machine of host", keys.host_machine)
        by_host = {one.host: one for one in sorted(found, key=lambda one: one.read_at)}
        return [by_host[host] for host in sorted(by_host)]

    def _of_hosts(self, record: type[T], name: str, key: Callable[[str], str]) -> list[T]:
        ids = self._host_ids()
        found = self._redis.mget(map(key, ids)) if ids else []
        return _readable(record, name, ids, found)

    def _host_ids(self) -> list[str]:
        return [name.decode(errors="replace") for name in self._redis.zrange(keys.HOSTS, 0, -1)]

    def elapsed_s(self, record: deployments.DeploymentRecord) -> float:
        """Returns the seconds from the request until the model served or failed, or until now."""
        return (record.settled_at or self._clock()) - record.asked_at

    # Hosts: begin, report, leave.

    def deploy_first(self, wanted: deployments.Deployment, host_id: str) -> bool:
        """Deploys the --model of a starting host. Returns False if the current deployment stays
        instead. It always stays if other hosts live. If it neither failed nor was withdrawn, it
        also stays if a client requested it, or if it has the same model.
        """
        return self._set(wanted, "start", host_id)[0] == "ok"

    def restore(self, known: deployments.DeploymentRecord, host: str) -> bool:
        """Stores a deployment's record that Redis has lost. Returns False if Redis has a newer
        record or the record of a later request. `host`: this host's name, for the event.
        """
        wanted = known.wanted
        fields = {
            "wanted": wanted.model_dump_json(exclude_unset=True) if wanted else "",
            "by": known.by,
            "asked_at": known.asked_at,
            "engines": known.engines if wanted else None,
            "settled_at": known.settled_at,
            "error": known.error,
        }
        args: list[Any] = [known.generation, self._clock(), host, wanted.name if wanted else ""]
        args += [part for item in fields.items() if item[1] is not None for part in item]
        return bool(self._restore([keys.DEPLOYMENT], args))

    def report(self, report: deployments.HostReport) -> None:
        """Stores a host's report. If all live hosts report a failure, the deployment fails."""
        settings = self._settings
        args: list[Any] = [report.id, report.generation, report.state.value, report.error or ""]
        args += [report.model_dump_json(), self._clock(), settings.worker_ttl_s]
        args += [settings.job_ttl_sec, report.model or "", report.engine_at]
        self._report([keys.DEPLOYMENT, keys.HOSTS, keys.host(report.id)], args)

    def store_logs(self, host_id: str, logs: deployments.HostLogs) -> None:
        """Stores the last log lines of a host's workers, with the TTL of the host's report."""
        ttl_s = self._settings.worker_ttl_s
        self._redis.set(keys.host_logs(host_id), logs.model_dump_json(), ex=ttl_s)

    def store_machine(self, host_id: str, figures: MachineFigures) -> None:
        """Stores a machine's measurements, separately from heartbeats, which must be small."""
        self._redis.set(keys.host_machine(host_id), figures.model_dump_json(), ex=FIGURES_S)

    def leave(self, host_id: str) -> None:
        """Deletes the records of a host that stops."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.host(host_id), keys.host_logs(host_id), keys.host_machine(host_id))
            pipe.zrem(keys.HOSTS, host_id)
            pipe.execute()
        if not self.hosts():  # without live hosts, none is reported as missing
            self._redis.delete(keys.HOSTS)

    def drop_silent(self) -> None:
        """Sets a TTL for the record of each host. The records of hosts that report again stay."""
        for host_id in self._host_ids():
            self._redis.expire(keys.host(host_id), self._settings.worker_ttl_s)

    def _set(
        self, wanted: deployments.Deployment, by: Literal["start", "request"], host_id: str = ""
    ) -> tuple[str, int]:
        args: list[Any] = [wanted.model_dump_json(exclude_unset=True), by, self._clock()]
        args += [uuid.uuid4().hex, host_id, wanted.name, deployments.KEPT_S]
        outcome, generation = self._deploy([keys.DEPLOYMENT, keys.HOSTS, keys.MODELS], args)
        return outcome.decode(), int(generation)


def _readable(
    record: type[T], name: str, ids: Sequence[str], found: Sequence[bytes | None]
) -> list[T]:
    read = (
        readable(f"{name} {host_id!r}", partial(record.model_validate_json, raw))
        for host_id, raw in zip(ids, found, strict=True)
        if raw is not None
    )
    return [one for one in read if one is not None]
