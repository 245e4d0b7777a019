"""What a health check is told of a host that has a part of another one's engine."""

import socket
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from cli.main import app
from poc_core.serving.deployments import HostReport, HostState
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore

HERE = socket.gethostname()


@pytest.fixture
def store(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> DeploymentStore:
    monkeypatch.setattr("cli.run.ready.connect", lambda settings: redis)
    return DeploymentStore(redis, Settings())


def report(store: DeploymentStore, **said: Any) -> None:
    common = {"id": "h-7-aaaaaa", "host": HERE, "state": HostState.SERVING, "generation": 1}
    store.report(HostReport(**common | said))


def test_a_host_without_a_worker_is_not_ready(store: DeploymentStore) -> None:
    report(store, workers=1, ready=1)  # by its supervisor's word, and nobody registered
    done = CliRunner().invoke(app, ["ready"])
    assert (done.exit_code, done.stderr) == (1, f"error: 0 of 0 worker(s) on {HERE} are ready.\n")


@pytest.mark.parametrize(
    ("said", "is_ready"),
    [({"ready": 1}, True), ({"ready": 0}, False), ({"ready": 1, "host": "another"}, False)],
)
def test_a_part_of_another_hosts_engine_is_ready_with_it(
    store: DeploymentStore, said: Any, is_ready: bool
) -> None:
    report(store, follows="10.0.0.1:7070", **said)
    done = CliRunner().invoke(app, ["ready"])
    assert done.exit_code == (0 if is_ready else 1)
    told = f"The part of the engine at 10.0.0.1:7070 on {HERE} is ready.\n"
    assert (done.stderr == told) == is_ready
