"""`proofline round status`, as text, as a picture and as JSON."""

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.ask import round_view
from cli.main import app
from tests.harness.samples import distance_body
from tests.peers.round_api import URL, FakeApi, drawn, status_of, without_a_round

NOW = 1_000_000.0


def test_status_shows_the_round_its_workers_and_its_outbox(api: FakeApi, runner: CliRunner) -> None:
    answer = runner.invoke(app, ["round", "status"])
    assert answer.exit_code == 0, answer.output
    rows = [" ".join(row.split()) for row in answer.stdout.splitlines()]
    for row in [
        "state GENERATING",
        "model tiny-qwen3, seq_len 64, k_dim 12, batches of 32",
        "block 0xabc at height 7",
        "nonces node 1 of 3",
        "elapsed 1:02:05",
        "rate 103.4 nonces/s now, 98.8 over the round",
        "computed 4,321 nonces",
        "jobs 55 nonces queued",
        "w1 ready 4,000 103.4",
        "w2 gone 321 0.0",
        f"receiver {URL}",
        "delivered 4,200",
        "waiting 121, 9,680 of 5,000,000 B",
    ]:
        assert row in rows


def test_status_as_json_is_the_apis_answer(api: FakeApi, runner: CliRunner) -> None:
    answer = runner.invoke(app, ["round", "status", "--json"])
    assert json.loads(answer.stdout) == status_of()
    assert len(answer.stdout.splitlines()) == 1


def test_status_without_a_round_is_no_failure(api: FakeApi, runner: CliRunner) -> None:
    api.looks = [without_a_round()]
    answer = runner.invoke(app, ["round", "status"])
    assert answer.exit_code == 0
    assert "IDLE" in answer.stdout
    assert "no workers" in answer.stdout


@pytest.mark.parametrize(
    "changed", [{"stats": None}, {"stats": {}}, {"state": 7}, {"health": ["x"]}]
)
def test_a_status_of_another_version_is_an_error(
    api: FakeApi, runner: CliRunner, changed: dict[str, Any]
) -> None:
    api.looks = [status_of() | changed]
    answer = runner.invoke(app, ["round", "status"])
    assert answer.exit_code == 1
    assert "is it of another version?" in answer.output
    assert runner.invoke(app, ["round", "status", "--json"]).exit_code == 0


def test_status_of_a_distance_round_shows_valid_nonces_and_the_target(
    api: FakeApi, runner: CliRunner
) -> None:
    config = distance_body(batch_size=32, model="tiny-qwen3", callback_url=None)
    api.looks = [status_of() | {"config": config, "total_valid": 430, "r_target": 1.405}]
    shown = runner.invoke(app, ["round", "status"]).stdout
    assert "4,321 nonces, 430 of them below r_target 1.405" in shown
    assert "distances below 1.405" in shown
    assert "no callback url" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outbox": {"full": True}}, "FULL: the round pauses until the receiver takes some"),
        (
            {"outbox": {"failures": 3, "last_error": "it answered 500"}},
            "FAILING (tries in a row: 3): it answered 500",
        ),
        ({"outbox": {"dropped": 1200}}, "1,200 DROPPED after POC_CALLBACK_MAX_RETRIES"),
        ({"error": "k_dim is too large."}, "k_dim is too large."),
    ],
    ids=["full", "failures", "dropped", "error"],
)
class TestTroubles:
    def test_are_red_in_the_picture(self, changes: dict[str, Any], message: str) -> None:
        console = Console(
            file=io.StringIO(), force_terminal=True, color_system="standard", width=200
        )
        console.print(round_view.picture(status_of(**changes), NOW))
        (row,) = [row for row in drawn(console).splitlines() if message in row]
        assert f"\x1b[1;31m{message}" in row

    def test_stand_at_the_end_of_the_line(self, changes: dict[str, Any], message: str) -> None:
        assert round_view.line(status_of(**changes)).endswith(message)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"failures": 3, "last_error": "500", "next_try_at": NOW + 12.3}, "in 12 s"),
        ({"failures": 1, "last_error": "[bold]odd[/bold] [/] x"}, "[bold]odd[/bold] [/] x"),
    ],
    ids=["when the next try is due", "what a receiver answers as it is"],
)
def test_the_picture_shows(told: dict[str, Any], shown: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(round_view.picture(status_of(outbox=told), NOW))
    assert shown in drawn(console)
