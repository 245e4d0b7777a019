"""`proofline deploy`: what it says of a model on its way, and why one cannot be served."""

from typing import Any, cast

import pytest
from typer.testing import CliRunner

from cli.ask import deploy
from cli.main import app
from poc_core.answers import HostStatus, UpStatus
from proofline.client import Client


def up_status(status: str, **changes: Any) -> UpStatus:
    host = HostStatus(id="h", host="gpu-1", state="starting", model="m", workers=2, ready=1)
    found = {
        "is_running": status == "running",
        "status": status,
        "elapsed_seconds": 61.0,
        "error": None,
        "model": "m",
        "hosts": [host],
        "is_starting": status == "starting",
        "models": [],
        "workers_running": 1,
        "workers_starting": 1,
    }
    return UpStatus.model_validate(found | changes)


class Node:
    """Tells one state of the deployment after the other."""

    def __init__(self, *states: UpStatus) -> None:
        self._states = list(states)

    def deployment(self) -> UpStatus:
        return self._states.pop(0)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "POLL_S", 0.0)
    monkeypatch.setattr(deploy, "SAY_AGAIN_S", 0.0)


def wait(*states: UpStatus) -> None:
    deploy.wait_served(cast(Client, Node(*states)))


def test_a_model_that_loads_is_told_until_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = ["--foo: unknown to vLLM 0.32"]
    host = HostStatus(
        id="h", host="gpu-1", state="failed", workers=2, ready=0, error="no memory",
        left_out=left_out,
    )  # fmt: skip
    wait(
        up_status("starting"),
        up_status("running", elapsed_seconds=None, hosts=[host], left_out=left_out),
    )
    assert capsys.readouterr().out.splitlines() == [
        "m: starting, 61 s",
        "  gpu-1: starting m, 1 of 2 workers ready",
        "m: running",
        "  left out --foo: unknown to vLLM 0.32",
        "  gpu-1: failed: no memory",
        "  gpu-1: left out --foo: unknown to vLLM 0.32",
    ]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (up_status("failed", error="no such model"), "m cannot be served: no such model"),
        (up_status("idle", model=None), "Somebody has stopped the node meanwhile"),
    ],
    ids=["failed", "stopped"],
)
def test_one_that_will_not_serve_ends_the_waiting(state: UpStatus, says: str) -> None:
    with pytest.raises(deploy.DeployError, match=says):
        wait(state)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Name a model to deploy, or give --status"),
        (["m", "--status"], "Name a model to deploy, or give --status"),
        (["m", "512"], "'512' is not an option; arguments of `vllm serve` go to the end"),
    ],
)
def test_words_that_mean_nothing_are_refused_before_anybody_is_asked(
    words: list[str], says: str
) -> None:
    found = CliRunner().invoke(app, ["deploy", *words, "--url", "http://127.0.0.1:9"])
    assert says in str(found.exception) + found.output
    assert found.exit_code != 0
