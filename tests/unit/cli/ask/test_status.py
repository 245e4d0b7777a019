"""`proofline status` against the API itself, in this process."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from cli.ask import status as status_module
from cli.main import app
from poc_core.records import RoundState
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from proofline.client import sync as client_module
from tests.harness.samples import MODEL, round_config, status_answer, worker_record

Ask = Callable[..., Result]


@pytest.fixture
def ask(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs the command, wide enough that no line is wrapped."""

    def forward(request: httpx.Request) -> httpx.Response:
        answer = client.request(request.method, str(request.url.path))
        return httpx.Response(answer.status_code, content=answer.content)

    usual = httpx.Client
    monkeypatch.setattr(
        client_module.httpx,
        "Client",
        lambda **options: usual(**options | {"transport": httpx.MockTransport(forward)}),
    )
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *options: CliRunner().invoke(app, ["status", *options])


NAMES = ["health", "model", "workers", "round", "jobs", "deliveries", "chat"]


def test_an_empty_node_is_down_and_says_what_is_missing(ask: Ask) -> None:
    answer = ask()
    assert answer.exit_code == 1
    lines = [line.split() for line in answer.stdout.splitlines()]
    named = [line for line in lines if line[0] in NAMES]
    assert lines[:1] + named[1:3] == [
        ["health", "down"],
        ["model", "none:", "idle"],
        ["workers", "0", "of", "0", "ready"],
    ]
    assert lines[1][:4] == ["no", "worker", "is", "here:"]
    assert [line[0] for line in named] == NAMES


def test_a_node_at_work_fits_one_screen(
    ask: Ask, serve: Callable[..., Any], workers: WorkerRegistry, rounds: RoundStore
) -> None:
    chat = {"chat_active": 2, "chat_total": 5}
    for number in range(20):
        workers.heartbeat(replace(worker_record(f"w{number}"), stats=chat))
    serve("loading", state="starting")
    rounds.store(round_config(), RoundState.GENERATING)
    answer = ask()
    assert answer.exit_code == 0, answer.output
    assert "20 of 21 ready" in answer.stdout
    assert answer.stdout.index("loading: starting") < answer.stdout.index("w0: ready")
    assert "GENERATING, 0 nonces, 0.0/s now" in answer.stdout
    assert "40 now, 100 answered" in answer.stdout
    assert "deliveries  receivers that wait: 0" in answer.stdout
    assert len(answer.stdout.splitlines()) <= 20


def test_a_worker_that_ended_counts_and_is_told_before_it_is_back_in_redis(
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = status_answer([MODEL])
    seat = {"name": "here/gpu0", "model": MODEL, "state": "ready", "worker_id": "w1"}
    ended = {"name": "here/gpu1", "state": "starting", "worker_id": None}
    node["seats"] = [
        seat | {"last_exit": None},
        seat | ended | {"last_exit": "killed by SIGKILL"},
    ]
    deployment = {"model": "/models/m", "models": ["m"], "status": "running", "error": None}
    status_module.show(node, deployment | {"elapsed_seconds": 61.0, "hosts": []}, now=61.0)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[1:5] == [
        ["model", "m", "(/models/m):", "running", "after", "61", "s"],
        ["workers", "1", "of", "2", "ready"],
        ["here/gpu1:", "starting,", f"{MODEL},", "ended", "(killed", "by", "SIGKILL)"],
        ["w1:", "ready,", f"{MODEL},", "started", "1", "min", "ago"],
    ]


def test_health_is_the_nodes_own_where_it_tells_one(capsys: pytest.CaptureFixture[str]) -> None:
    reason = {"level": "degraded", "text": "1 of 2 workers ready for 2 min"}
    silent = {"receiver": "10.0.0.9:80", "failures": 6, "next_try_at": 107.0}
    node = status_answer([MODEL]) | {
        "health": {"level": "degraded", "reasons": [reason]},
        "silent_receivers": [silent],
    }
    deployment = {"model": MODEL, "models": [MODEL], "status": "running", "error": None}
    status_module.show(node, deployment | {"elapsed_seconds": None, "hosts": []}, now=100.0)
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["health", "degraded"]
    assert "1 of 2 workers ready for 2 min" in shown
    assert "10.0.0.9:80 does not answer, 6 tries; the next in 7 s" in shown


def test_what_is_wrong_with_a_round_and_a_deployment_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a node, too, that is too old to tell its own health."""
    outbox = {"full": True, "failures": 3, "last_error": "answered 500", "dropped": 2}
    told = {"error": "no worker of its model", "artifacts_waiting": 7, "outbox": outbox}
    node = status_answer([MODEL])
    node |= {"state": "GENERATING", "config": {}, "stats": node["stats"] | told}
    hosts = [
        {"host": "gpu-1", "state": "failed", "model": None, "error": "no memory"},
        {"host": "gpu-2", "state": "starting", "model": MODEL, "ready": 1, "workers": 2}
        | {"error": None},
    ]
    deployment = {"model": MODEL, "models": [], "status": "failed", "error": "one host failed"}
    status_module.show(node, deployment | {"elapsed_seconds": 61.0, "hosts": hosts}, now=100.0)
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "health ok",
        f"model {MODEL}: failed after 61 s one host failed",
        "gpu-1: failed: no memory",
        "gpu-2: starting, 1 of 2 workers ready",
        "no worker of its model",
        "7 artifacts of the round",
        "FULL: the round pauses",
        "FAILING (tries in a row: 3): answered 500",
        "2 DROPPED after POC_CALLBACK_MAX_RETRIES",
    ):
        assert words in shown, shown
    node |= {"workers": []}
    status_module.show(node, deployment | {"elapsed_seconds": None, "hosts": []}, now=100.0)
    assert capsys.readouterr().out.split()[:2] == ["health", "down"]


def test_the_apis_own_answers_are_one_line_of_json(ask: Ask, serve: Callable[..., Any]) -> None:
    serve("w1")
    found = json.loads(ask("--json").stdout)
    assert found["node"]["workers"][0]["id"] == "w1"
    assert found["deployment"]["models"] == [MODEL]
