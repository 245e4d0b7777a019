"""`proofline round start` and `stop`."""

from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cli.main import app
from tests.peers.round_api import URL, FakeApi, without_a_round

START = ["round", "start", "--block-hash", "0xabc", "--public-key", "node-1"]
# What each round's body begins with.
BODY = {
    "block_hash": "0xabc",
    "block_height": 0,
    "public_key": "node-1",
    "node_id": 0,
    "node_count": 1,
}


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
    expected = BODY | {
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
    expected = BODY | {
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
