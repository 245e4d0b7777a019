"""`proofline round` against a stand-in for the API."""

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.ask import round as round_module
from cli.ask import round_view
from cli.main import app
from proofline.client import ApiError
from proofline.client import sync as client_module
from tests.harness.samples import distance_body, round_body, status_answer

START = ["round", "start", "--block-hash", "0xabc", "--public-key", "node-1"]
URL = "http://127.0.0.1:9100"
NOW = 1_000_000.0


def status_of(state: str = "GENERATING", **changes: Any) -> dict[str, Any]:
    """The API's status of a round on two workers, one of which is gone; changes are merged into
    its stats.
    """
    outbox: dict[str, Any] = {
        "bytes": 9_680,
        "limit_bytes": 5_000_000,
        "full": False,
        "dropped": 0,
        "failures": 0,
    }
    outbox |= {"next_try_at": None, "last_error": None}
    stats = {
        "total_processed": 4321,
        "nonces_per_second": 103.44,
        "nonces_per_second_of_round": 98.76,
        "elapsed_seconds": 3725.9,
        "n_excluded": 0,
        "excluded_nonces": [],
        "workers": {
            "w1": {"total_processed": 4000, "nonces_per_second": 103.44},
            "w2": {"total_processed": 321, "nonces_per_second": 0.0},
        },
        "artifacts_delivered": 4200,
        "artifacts_waiting": 121,
        "outbox": outbox | changes.pop("outbox", {}),
        "error": None,
    }
    config = round_body(
        block_hash="0xabc", public_key="node-1", node_id=1, node_count=3, batch_size=32, url=URL
    ) | {"group_id": 0, "n_groups": 1, "poc_stronger_rng": False}
    running = {"status": state, "state": state, "config": config, "stats": stats | changes}
    return status_answer(["tiny-qwen3"]) | running | {"queued_nonces": 55}


def without_a_round() -> dict[str, Any]:
    return status_answer([])


class FakeApi:
    """Answers /status with the next of `looks`, the last one again and again; remembers what is
    posted.
    """

    def __init__(self) -> None:
        self.looks: list[dict[str, Any] | int | Exception] = [status_of()]
        self.refusal: tuple[int, Any] | None = None
        self.busy = 0  # how often a POST is asked to come again
        self.posted: list[tuple[str, Any]] = []
        self.asked: list[str] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1/pow")
        self.asked.append(str(request.url))
        if request.method == "POST":
            self.posted.append((path, json.loads(request.content) if request.content else None))
            if self.busy:
                self.busy -= 1
                return httpx.Response(
                    503, json={"detail": "No worker is ready"}, headers={"Retry-After": "0"}
                )
            if self.refusal:
                return httpx.Response(self.refusal[0], json={"detail": self.refusal[1]})
            return httpx.Response(
                200, json={"status": "OK", "pow_status": {"status": "STOPPED"}, "cancelled_jobs": 2}
            )
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        if isinstance(look, int):
            return httpx.Response(look, json={"detail": "away"})
        return httpx.Response(200, json=look)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake, client = FakeApi(), httpx.Client
    transport = httpx.MockTransport(fake.answer)
    monkeypatch.setattr(
        client_module.httpx,
        "Client",
        lambda **options: client(**options | {"transport": transport}),
    )
    return fake


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PROOFLINE_URL", raising=False)
    return CliRunner()


# Starting.


def test_what_the_api_wants_to_be_asked_again_is_and_its_user_sees_why(
    api: FakeApi, runner: CliRunner
) -> None:
    api.busy = 2
    answer = runner.invoke(app, START)
    assert answer.exit_code == 0, answer.output
    again = "No worker is ready (HTTP 503). Trying again in 0 s, as the API asks."
    assert answer.stderr.count(again) == 2
    assert len(api.posted) == 3


def test_start_sends_a_round_of_the_only_model(api: FakeApi, runner: CliRunner) -> None:
    answer = runner.invoke(app, START)
    assert answer.exit_code == 0, answer.output
    expected = {
        "block_hash": "0xabc",
        "block_height": 0,
        "public_key": "node-1",
        "node_id": 0,
        "node_count": 1,
        "group_id": 0,
        "n_groups": 1,
        "params": {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12},
        "poc_stronger_rng": False,
    }
    assert api.posted == [("/init/generate", expected)]


def test_start_sends_what_its_options_say(api: FakeApi, runner: CliRunner) -> None:
    options = "--node-id 1 --node-count 3 --group-id 1 --n-groups 2 --block-height 9 --model other"
    options += f" --seq-len 256 --k-dim 8 --stronger-rng --batch-size 16 --callback-url {URL}"
    answer = runner.invoke(app, [*START, *options.split()])
    assert answer.exit_code == 0, answer.output
    ((_, sent),) = api.posted
    assert sent["params"] == {"model": "other", "seq_len": 256, "k_dim": 8}
    assert (sent["node_id"], sent["node_count"], sent["group_id"], sent["n_groups"]) == (1, 3, 1, 2)
    assert (sent["block_height"], sent["batch_size"]) == (9, 16)
    assert (sent["poc_stronger_rng"], sent["url"]) == (True, URL)


def test_start_with_max_tokens_sends_a_round_of_chains(api: FakeApi, runner: CliRunner) -> None:
    answer = runner.invoke(app, [*START, "--max-tokens", "64"])
    assert answer.exit_code == 0, answer.output
    ((_, sent),) = api.posted
    params = {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12, "decode": True, "max_tokens": 64}
    assert sent["params"] == params


def test_start_with_an_r_target_sends_a_distance_round(api: FakeApi, runner: CliRunner) -> None:
    options = "--r-target 1.405 --fraud-threshold 0.05 --layer-hooks --n-groups 2 --group-id 1"
    answer = runner.invoke(app, [*START, *options.split(), "--callback-url", URL])
    assert answer.exit_code == 0, answer.output
    expected = {
        "block_hash": "0xabc",
        "block_height": 0,
        "public_key": "node-1",
        "node_id": 0,
        "node_count": 1,
        "group_id": 1,
        "n_groups": 2,
        "r_target": 1.405,
        "seq_len": 256,
        "model": "tiny-qwen3",
        "use_sign_flips": False,
        "use_layer_hooks": True,
        "fraud_threshold": 0.05,
        "callback_url": URL,
    }
    assert api.posted == [("/init/generate", expected)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--r-target 1.4 --k-dim 8 --stronger-rng", "--k-dim and --stronger-rng is for artifacts"),
        ("--r-target 1.4 --max-tokens 8", "--max-tokens is for artifacts"),
        ("--layer-hooks", "--layer-hooks is for distances; give --r-target too"),
        ("--fraud-threshold 0.5", "--fraud-threshold is for distances"),
        ("--r-target 0", "above 0, up to 2, not 0"),
        ("--r-target 2.1", "above 0, up to 2, not 2.1"),
        ("--node-count 0", "--node-count"),
        ("--node-id -1", "--node-id"),
        ("--batch-size 0", "--batch-size"),
        ("--seq-len x", "--seq-len"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_asked(
    api: FakeApi, runner: CliRunner, wrong: str, message: str
) -> None:
    answer = runner.invoke(app, [*START, *wrong.split()])
    assert (answer.exit_code, api.asked) == (2, [])
    assert message in answer.stderr


def test_start_says_how_to_go_on(api: FakeApi, runner: CliRunner) -> None:
    answer = runner.invoke(app, [*START, "--callback-url", URL, "--url", "http://node:8000"])
    assert "proofline round watch --url http://node:8000" in answer.stderr
    assert api.asked[-1].startswith("http://node:8000/")
    assert answer.stdout == ""


def test_start_says_that_without_a_callback_url_nobody_gets_anything(
    api: FakeApi, runner: CliRunner
) -> None:
    assert "sent to nobody" in runner.invoke(app, START).stderr
    assert "sent to nobody" not in runner.invoke(app, [*START, "--callback-url", URL]).stderr


@pytest.mark.parametrize(
    ("status", "detail", "message"),
    [
        (409, "A round is generating already.", "A round is generating already."),
        (422, [{"loc": ["body", "batch_size"], "msg": "at most 128"}], "batch_size: at most 128"),
        (503, "No worker serves the model.", "No worker serves the model."),
    ],
)
def test_a_refused_start_is_a_failure_in_the_apis_words(
    api: FakeApi, runner: CliRunner, status: int, detail: Any, message: str
) -> None:
    api.refusal = (status, detail)
    answer = runner.invoke(app, START)
    assert answer.exit_code == 1
    assert f"error: {message} (HTTP {status})" in answer.stderr


@pytest.mark.parametrize("missing", ["--block-hash", "--public-key"])
def test_start_needs(api: FakeApi, runner: CliRunner, missing: str) -> None:
    at = START.index(missing)
    answer = runner.invoke(app, START[:at] + START[at + 2 :])
    assert answer.exit_code == 2
    assert missing in answer.output


# Stopping.


def test_stop_stops_the_round_and_names_the_cancelled_jobs(api: FakeApi, runner: CliRunner) -> None:
    answer = runner.invoke(app, ["round", "stop"])
    assert answer.exit_code == 0, answer.output
    assert api.posted == [("/stop", None)]
    assert "The round is stopped." in answer.stderr
    assert "2 jobs are cancelled." in answer.stderr


def test_stop_without_a_round_says_so(api: FakeApi, runner: CliRunner) -> None:
    api.looks = [without_a_round()]
    answer = runner.invoke(app, ["round", "stop"])
    assert (answer.exit_code, "No round was running." in answer.stderr) == (0, True)


# Status.


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


# Watching.


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


def test_watch_outlives_a_restart_of_the_api(api: FakeApi, runner: CliRunner) -> None:
    api.looks = [status_of(), status_of(), httpx.ConnectError("refused"), 503, status_of()]
    api.looks.append(status_of("STOPPED"))
    answer = runner.invoke(app, WATCH)
    assert answer.exit_code == 0, answer.output
    begins = [row.partition(":")[0] for row in answer.stdout.splitlines()]
    assert begins == ["1", *["no answer, trying again"] * 2, "1", "1"]


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


def drawn(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


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


# Help.


def test_a_round_without_a_command_shows_the_help(runner: CliRunner) -> None:
    shown = runner.invoke(app, ["round"]).output
    assert all(command in shown for command in ("start", "status", "stop", "watch"))


@pytest.mark.parametrize(
    "call", [["status"], ["stop"], ["watch"], START[1:]], ids=lambda call: call[0]
)
def test_nobody_listening_is_one_clear_line(
    api: FakeApi, runner: CliRunner, call: list[str]
) -> None:
    api.looks = [httpx.ConnectError("refused")]
    answer = runner.invoke(app, ["round", *call])
    assert answer.exit_code == 1
    assert "No answer from http://127.0.0.1:8000" in answer.stderr
