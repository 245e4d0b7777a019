"""`proofline ready`, as a container's health check asks it."""

from dataclasses import replace

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from cli.run.ready import ready
from poc_core.errors import ProoflineError
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import worker_record


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, redis: Redis, workers: WorkerRegistry) -> None:
    """This machine, with a worker that is ready on another one."""
    monkeypatch.setattr("cli.run.ready.connect", lambda _settings: redis)
    monkeypatch.setattr("poc_core.state.registry.socket.gethostname", lambda: "here")
    workers.heartbeat(replace(worker_record("w0"), machine="elsewhere"))


def test_where_one_is_ready_it_says_so(
    workers: WorkerRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.heartbeat(replace(worker_record("w1"), machine="here"))
    workers.heartbeat(replace(worker_record("w2", state="starting"), machine="here"))
    ready()
    assert "1 of 2 worker(s) on here are ready." in capsys.readouterr().err


def test_where_none_is_it_is_an_error(workers: WorkerRegistry) -> None:
    workers.heartbeat(replace(worker_record("w2", state="starting"), machine="here"))
    with pytest.raises(ProoflineError, match=r"0 of 1 worker\(s\) on here are ready"):
        ready()


def test_a_redis_that_is_away_is_told_with_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_registry: WorkerRegistry) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(WorkerRegistry, "here", away)
    with pytest.raises(ProoflineError, match=r"Redis does not answer \(refused\).*POC_REDIS_URL"):
        ready()
