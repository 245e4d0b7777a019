"""`proofline round watch`, in a file and on a terminal."""

import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.ask import round as round_module
from cli.main import app
from proofline.client import ApiError
from tests.peers.round_api import FakeApi, drawn, status_of, without_a_round

WATCH = ["round", "watch", "--interval", "0.1"]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long watching sleeps between its looks; it does not really."""
    slept: list[float] = []
    monkeypatch.setattr(round_module.time, "sleep", slept.append)
    return slept


def test_watch_prints_a_line_per_look_until_the_round_stops(
    api: FakeApi, runner: CliRunner, pauses: list[float]
) -> None:
    api.looks = [status_of(), status_of(), status_of(total_processed=5000), status_of("STOPPED")]
    answer = runner.invoke(app, WATCH)
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    assert lines[0] == (
        "1:02:05 GENERATING, 103.4 nonces/s now, 98.8 over the round, 4,321 computed, 1 worker,"
        " 4,200 delivered, 121 waiting, 55 nonces of jobs queued"
    )
    assert "5,000 computed" in lines[1]
    assert "STOPPED" in lines[2]
    assert pauses == [0.1, 0.1]


def test_watch_says_how_the_round_ended_and_what_still_waits(
    api: FakeApi, runner: CliRunner
) -> None:
    api.looks = [status_of(), status_of("STOPPED")]
    said = runner.invoke(app, WATCH).stderr
    assert "The round is STOPPED. 121 artifacts still wait for delivery." in said


@pytest.mark.parametrize(
    "look", [without_a_round(), status_of("STOPPED")], ids=["none yet", "stopped"]
)
def test_watch_without_a_round_is_a_failure_that_says_what_to_do(
    api: FakeApi, runner: CliRunner, look: dict[str, Any]
) -> None:
    api.looks = [look]
    answer = runner.invoke(app, WATCH)
    assert answer.exit_code == 1
    assert "proofline round start" in answer.stderr


def test_watch_goes_on_while_a_round_validates(api: FakeApi, runner: CliRunner) -> None:
    api.looks = [status_of(), status_of("VALIDATING"), status_of("STOPPED")]
    assert len(runner.invoke(app, WATCH).stdout.splitlines()) == 2


def test_watch_outlives_a_restart_of_the_api_and_too_many_requests(
    api: FakeApi, runner: CliRunner
) -> None:
    api.looks = [status_of(), status_of(), httpx.ConnectError("refused"), 503, 429]
    api.looks += [status_of(), status_of("STOPPED")]
    answer = runner.invoke(app, WATCH)
    assert answer.exit_code == 0, answer.output
    begins = [row.partition(":")[0] for row in answer.stdout.splitlines()]
    assert begins == ["1", *["no answer, trying again"] * 3, "1", "1"]


def test_watch_gives_up_when_the_api_stays_away(
    api: FakeApi, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_module, "POLL_PATIENCE_S", -1)
    api.looks = [status_of(), httpx.ConnectError("refused")]
    answer = runner.invoke(app, WATCH)
    assert answer.exit_code == 1
    assert "is `proofline up` running there?" in answer.stderr


def test_ctrl_c_ends_the_watching_and_not_the_round(
    api: FakeApi, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(round_module.time, "sleep", interrupt)
    answer = runner.invoke(app, WATCH)
    assert answer.exit_code == 0
    assert "the round continues" in answer.stderr
    assert api.posted == []


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, height=40, _environ={})


def looks(*them: Any) -> Iterator[Any]:
    yield from them


def test_on_a_terminal_every_look_is_drawn_over_the_last(terminal: Console) -> None:
    one, other = status_of(total_processed=1111), status_of(total_processed=2222)
    round_module.show(looks(one, other), terminal)
    first, second = drawn(terminal).index("1,111"), drawn(terminal).index("2,222")
    assert "\x1b[1A" in drawn(terminal)[first:second]  # the cursor goes up


def test_the_last_picture_stays_on_the_terminal(terminal: Console) -> None:
    last = round_module.show(looks(status_of(), status_of("STOPPED")), terminal)
    assert last["state"] == "STOPPED"
    assert "STOPPED" in drawn(terminal)[drawn(terminal).rindex("GENERATING") :]


def test_while_the_api_is_away_the_terminal_keeps_the_last_picture(terminal: Console) -> None:
    round_module.show(looks(status_of(total_processed=1111), ApiError("No answer")), terminal)
    away = drawn(terminal).index("No answer, trying again: No answer")
    assert drawn(terminal)[:away].count("1,111") == 2
