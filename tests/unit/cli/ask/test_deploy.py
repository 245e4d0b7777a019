"""`proofline deploy`: what it says of a model on its way, and why one cannot be served."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from cli.ask import deploy
from cli.main import app
from poc_core.answers import HostStatus, UpStatus
from proofline.client import ApiError, Client
from tests.peers.hub import REPO, Hub


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
        "m: starting for 61 s",
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


class Serving:
    """A node that serves a model, and refuses a deployment for a while, with a status."""

    def __init__(self, refuses: int) -> None:
        self.refuses = refuses
        self.asked: list[str] = []

    @contextmanager
    def connect(self, _url: str) -> Iterator["Serving"]:
        yield self

    def undeploy(self) -> None:
        self.asked.append("undeploy")
        self.refuses = 0

    def deploy(self, model: str, *_how: Any) -> None:
        self.asked.append(f"deploy {model}")
        if self.refuses:
            raise ApiError("It refuses.", self.refuses)

    def deployment(self) -> UpStatus:
        return up_status("running")

    def status(self) -> Any:
        return SimpleNamespace(workers=[SimpleNamespace(engine="vllm")])


@pytest.fixture
def serving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Serving:
    node = Serving(request.param)
    monkeypatch.setattr("cli.ask.connection.connect", node.connect)
    return node


@pytest.mark.parametrize("serving", [422], indirect=True)
def test_what_is_refused_ends_nothing(serving: Serving) -> None:
    found = CliRunner().invoke(app, ["deploy", "m", "--", "--middleware", "x"])
    assert "It refuses." in str(found.exception) + found.output
    assert (found.exit_code, serving.asked) == (1, ["deploy m"])


@pytest.mark.parametrize("serving", [409], indirect=True)
@pytest.mark.parametrize("model", [REPO, "tiny-llama", "/data/model"])
def test_what_is_deployed_ends_for_what_can_be(serving: Serving, hub: Hub, model: str) -> None:
    found = CliRunner().invoke(app, ["deploy", model])
    asked = [f"deploy {model}", "undeploy", f"deploy {model}"]
    assert (found.exit_code, serving.asked) == (0, asked)
    assert "Ending what is deployed." in found.stderr


@pytest.mark.parametrize("serving", [409], indirect=True)
def test_a_name_that_the_hub_does_not_know_ends_nothing(serving: Serving, hub: Hub) -> None:
    found = CliRunner().invoke(app, ["deploy", "acme/smal"])
    said = str(found.exception) + found.output
    assert "There is no model 'acme/smal'" in said
    assert "What serves goes on." in said
    assert (found.exit_code, serving.asked) == (2, ["deploy acme/smal"])


@pytest.mark.parametrize("serving", [409], indirect=True)
def test_a_shipped_models_mistyped_name_ends_nothing(serving: Serving) -> None:
    found = CliRunner().invoke(app, ["deploy", "tiny-qwen"])
    assert "did you mean tiny-qwen3?" in str(found.exception) + found.output
    assert (found.exit_code, serving.asked) == (2, [])
