"""Hosts that follow the deployment in Redis, with fleets that only record their calls."""

from typing import cast

from redis import Redis

from cli.shipped import shipped_models
from cli.supervise.fleet import Fleet
from cli.supervise.follower import Follower
from cli.terminal import UsageError
from poc_core.serving.deployments import (
    Deployment,
    DeploymentRecord,
    DeploymentState,
    HostReport,
    HostState,
)
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import known
from tests.peers.fake_fleet import FakeFleet
from workers.engines.options import EngineOptions

LLAMA = Deployment(model="tiny-llama")
SYNTHETIC = EngineOptions(model="", engine="synthetic")
OWN = EngineOptions(
    model=str(shipped_models()["tiny-qwen3"]), served_model_name="tiny-qwen3", engine="synthetic"
)


class Host:
    """One that looks when it is told to."""

    def __init__(
        self,
        store: DeploymentStore,
        registry: WorkerRegistry,
        options: EngineOptions,
        name: str = "h1",
    ) -> None:
        self.fleets: list[FakeFleet] = []
        self.said: list[str] = []
        self.no_place: str | None = None
        self.store = store
        self.follower = Follower(store, registry, name, options, self._start, self.said.append)

    def _start(self, options: EngineOptions, own: bool) -> Fleet:
        if self.no_place:
            raise UsageError(self.no_place)
        self.fleets.append(FakeFleet(options))
        return cast(Fleet, self.fleets[-1])

    def look(self, times: int = 1) -> HostReport:
        """What it reports then."""
        for _ in range(times):
            self.follower.look()
            if (ending := vars(self.follower)["_ending"]) is not None:
                ending.join()
        return next(report for report in self.store.hosts() if report.id == self.follower.id)

    @property
    def fleet(self) -> FakeFleet:
        return self.fleets[-1]

    def serve(self) -> HostReport:
        self.fleet.is_serving = True
        return self.look()


class Node:
    """The hosts of a node, and the deployment that they follow."""

    def __init__(self, store: DeploymentStore, workers: WorkerRegistry, redis: Redis) -> None:
        self.store, self.workers, self.redis = store, workers, redis

    def host(self, options: EngineOptions = SYNTHETIC, name: str = "h1") -> Host:
        return Host(self.store, self.workers, options, name)

    def record(self) -> DeploymentRecord:
        return known(self.store.read())

    def asked_for_llama(self) -> Host:
        """A host that starts what it was asked for while it had no model."""
        h = self.host()
        h.look()
        self.store.deploy(LLAMA)
        h.look()
        return h

    def stopped_while_it_loads(self) -> Host:
        """A host whose model the network node has stopped after 15 minutes of loading."""
        h = self.asked_for_llama()
        self.store.withdraw(keeps=True)
        report = h.look()
        status = self.store.status()
        assert (report.state, status.state) == (HostState.KEEPING, DeploymentState.IDLE)
        assert status.is_gone
        return h
