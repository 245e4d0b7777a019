"""Hosts that follow the deployment in Redis."""

import pytest
from redis import Redis

from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import Clock
from tests.peers.hosts import Node


@pytest.fixture
def node(redis: Redis, settings: Settings, clock: Clock, workers: WorkerRegistry) -> Node:
    return Node(DeploymentStore(redis, settings, clock), workers, redis)
