"""`proofline deploy`: what it says of a model on its way, and why one cannot be served."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import huggingface_hub
import pytest
from typer.testing import CliRunner

from cli.ask import deploy
from cli.main import app
from poc_core.answers import HostStatus, UpStatus
from proofline.client import ApiError, Client
from proofline.client.calls import Call
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
        self.on_disk: list[str] = []  # of the API's machine

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

    def call(self, call: Call[Any]) -> Any:
        assert (call.method, call.path) == ("POST", "/api/v1/models/status")
        (name,) = cast(dict[str, str], call.body).values()
        if "#" in name:
            raise ApiError("No name of a repository.", 422)
        return {"status": "DOWNLOADED" if name in self.on_disk else "NOT_FOUND"}


@pytest.fixture
def serving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Serving:
    node = Serving(request.param)
    monkeypatch.setattr("cli.ask.deploy.connect", node.connect)
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
@pytest.mark.parametrize("model", ["acme/smal", "no#name"])
@pytest.mark.usefixtures("hub")
def test_a_name_that_the_hub_does_not_know_ends_nothing(serving: Serving, model: str) -> None:
    found = CliRunner().invoke(app, ["deploy", model])
    said = str(found.exception) + found.output
    assert f"There is no model '{model}'" in said
    assert "The current model keeps running." in said
    assert (found.exit_code, serving.asked) == (2, [f"deploy {model}"])


@pytest.fixture
def no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is out of reach from here."""
    nowhere = huggingface_hub.HfApi  # made before the hub is closed
    hub.__exit__()
    monkeypatch.setattr(huggingface_hub, "HfApi", nowhere)


@pytest.mark.parametrize("serving", [409], indirect=True)
@pytest.mark.parametrize("model", ["acme/smal", "acme/smal:Q4"])
@pytest.mark.usefixtures("no_hub")
def test_a_name_that_nobody_knows_ends_nothing_without_a_hub(serving: Serving, model: str) -> None:
    found = CliRunner().invoke(app, ["deploy", model])
    said = str(found.exception) + found.output
    assert "is not on this machine, and the Hugging Face hub cannot be reached" in said
    assert "copy the model into HF_HOME" in said
    assert "The current model keeps running." in said
    assert "`proofline undeploy`" in said
    assert (found.exit_code, serving.asked) == (1, [f"deploy {model}"])


@pytest.mark.parametrize("serving", [409], indirect=True)
@pytest.mark.usefixtures("hub")
def test_a_name_ends_nothing_where_the_hub_is_forbidden(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = CliRunner().invoke(app, ["deploy", REPO])
    assert "HF_HUB_OFFLINE forbids" in str(found.exception) + found.output
    assert (found.exit_code, serving.asked) == (1, [f"deploy {REPO}"])


@pytest.mark.parametrize("serving", [409], indirect=True)
@pytest.mark.parametrize("model", ["acme/private", "acme/private:Q4"])
@pytest.mark.usefixtures("no_hub")
def test_what_lies_on_the_node_is_deployed_without_a_hub(serving: Serving, model: str) -> None:
    serving.on_disk.append("acme/private")
    found = CliRunner().invoke(app, ["deploy", model])
    asked = [f"deploy {model}", "undeploy", f"deploy {model}"]
    assert (found.exit_code, serving.asked) == (0, asked)


@pytest.mark.parametrize("serving", [409], indirect=True)
@pytest.mark.usefixtures("no_hub")
def test_what_serves_is_deployed_again_without_a_hub(serving: Serving) -> None:
    found = CliRunner().invoke(app, ["deploy", "m", "--", "--max-model-len", "512"])
    assert (found.exit_code, serving.asked) == (0, ["deploy m", "undeploy", "deploy m"])


@pytest.mark.parametrize("serving", [409], indirect=True)
def test_a_shipped_models_mistyped_name_ends_nothing(serving: Serving) -> None:
    found = CliRunner().invoke(app, ["deploy", "tiny-qwen"])
    assert "did you mean tiny-qwen3?" in str(found.exception) + found.output
    assert (found.exit_code, serving.asked) == (2, [])


@pytest.mark.parametrize("serving", [409], indirect=True)
def test_a_directory_is_named_as_hosts_find_it(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["deploy", "./model"])
    there = f"deploy {tmp_path}/model"
    assert (found.exit_code, serving.asked) == (0, [there, "undeploy", there])


@pytest.mark.parametrize("serving", [409], indirect=True)
def test_a_directory_that_is_not_here_ends_nothing(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["deploy", "./model"])
    assert "There is no directory './model' here" in str(found.exception) + found.output
    assert (found.exit_code, serving.asked) == (2, [])
