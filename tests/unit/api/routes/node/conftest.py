"""The node with the routes by which the network node manages it."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from redis import Redis

from poc_core.serving.deployments import HostState
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from tests.harness.samples import Clock
from tests.peers.deployed_host import Host


@pytest.fixture
def store(redis: Redis, settings: Settings, clock: Clock) -> DeploymentStore:
    return DeploymentStore(redis, settings, clock)


@pytest.fixture
def host(store: DeploymentStore) -> Host:
    """One that lives and runs nothing."""
    host = Host(store)
    host.says(HostState.IDLE)
    return host


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Sends a request from another thread."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit
