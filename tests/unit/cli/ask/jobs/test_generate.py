"""`proofline generate` against a stand-in for the API."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from proofline.client import sync as client
from tests.peers.job_api import ARTIFACTS, CHAINS, PROOF_OPTIONS, RESULT, FakeApi


def running(done: int) -> dict[str, Any]:
    return {"status": "running", "request_id": "job-1", "n_done": done, "n_total": 3}


def test_generate_submits_waits_and_prints_the_result(fake: FakeApi) -> None:
    fake.polls = [(200, running(0)), (200, running(2)), (200, RESULT)]
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0-2")
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert document.pop("request")["params"] == {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12}
    assert document == RESULT
    assert fake.polled == ["job-1"] * 3


def test_a_scheme_is_asked_for_by_its_name(fake: FakeApi) -> None:
    chains = ["--scheme", "decode", "--param", "max_tokens=4", "--seq-len", "8"]
    fake.url = fake.url.removeprefix("http://")
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0-2", *chains)
    assert answer.exit_code == 0, answer.output
    assert fake.submitted[0]["params"] == {
        "model": "tiny-qwen3",
        "seq_len": 8,
        "scheme": "decode",
        "max_tokens": 4,
    }


def test_generate_sends_what_the_options_say(fake: FakeApi) -> None:
    options = [
        *PROOF_OPTIONS,
        "--nonces",
        "5,0-1",
        "--block-height",
        "9",
        "--seq-len",
        "128",
        "--k-dim",
        "4",
    ]
    more = ["--batch-size", "8", "--stronger-rng", "--model", "other"]
    assert fake.run("generate", *options, *more).exit_code == 0
    assert fake.submitted == [
        {
            "block_hash": "0xabc",
            "block_height": 9,
            "public_key": "node-1",
            "node_id": 0,
            "node_count": 1,
            "nonces": [5, 0, 1],
            "params": {"model": "other", "seq_len": 128, "k_dim": 4},
            "poc_stronger_rng": True,
            "batch_size": 8,
            "wait": False,
        }
    ]


def test_generate_writes_to_a_file(fake: FakeApi, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0-2", "--output", str(path))
    assert answer.stdout == ""
    assert json.loads(path.read_text())["artifacts"] == ARTIFACTS


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    fake: FakeApi, tmp_path: Path
) -> None:
    for path in (tmp_path / "missing" / "out.json", tmp_path / ("x" * 5000)):
        answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0", "-o", str(path))
        assert answer.exit_code == 2
        assert "choose another --output" in answer.output
        assert fake.submitted == []


def test_generate_can_wait_for_a_job_submitted_earlier(fake: FakeApi) -> None:
    answer = fake.run("generate", "--request-id", "job-7")
    assert json.loads(answer.stdout) == RESULT
    assert fake.polled == ["job-7"]
    assert fake.submitted == []
    assert fake.run("generate", "--request-id", "../x\n").exit_code == 0
    assert fake.polled[-1] == "..%2Fx%0A"


def test_generate_says_what_is_missing(fake: FakeApi) -> None:
    answer = fake.run("generate", "--nonces", "1")
    assert answer.exit_code == 2
    assert "Give --block-hash and --public-key, or --request-id" in answer.output


@pytest.mark.parametrize(
    ("models", "code", "message"),
    [
        ([], 1, "No worker serves a model yet"),
        (["b", "a", "b"], 2, "choose one with --model: a, b."),
    ],
)
def test_without_exactly_one_model_the_user_must_choose(
    fake: FakeApi, models: list[str], code: int, message: str
) -> None:
    fake.models = models
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "1")
    assert answer.exit_code == code
    assert message in answer.output


@pytest.mark.parametrize(
    ("submission", "message"),
    [
        (
            (429, {"detail": "Too many nonces are queued; wait."}),
            "Too many nonces are queued; wait. (HTTP 429)",
        ),
        (
            (422, {"detail": [{"loc": ["body", "params", "k_dim"], "msg": "must be at most 128"}]}),
            "params.k_dim: must be at most 128 (HTTP 422)",
        ),
        (
            (409, {"detail": {"message": "params mismatch", "deployed": {"model": "m"}}}),
            'params mismatch {"deployed": {"model": "m"}} (HTTP 409)',
        ),
        ((502, b"<html>bad gateway</html>"), "<html>bad gateway</html> (HTTP 502)"),
        ((200, b"hello"), "answers something that is not Proofline's; check the url."),
    ],
)
def test_a_refusal_is_shown_as_the_api_words_it(
    fake: FakeApi, submission: tuple[int, Any], message: str
) -> None:
    fake.submission = submission
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "1")
    assert answer.exit_code == 1
    assert message in answer.output
    assert answer.stdout == ""


@pytest.mark.parametrize(
    ("status", "end", "message"),
    [
        (200, {"status": "failed", "error": "the engine was lost"}, "failed: the engine was lost"),
        (200, {"status": "cancelled"}, "Job job-1 was cancelled"),
        (404, {"detail": "There is no job 'job-1'."}, "There is no job 'job-1'. (HTTP 404)"),
    ],
    ids=["failed", "cancelled", "expired"],
)
def test_a_job_without_a_result_is_a_failure(
    fake: FakeApi, status: int, end: dict[str, Any], message: str
) -> None:
    fake.polls = [(200, running(1)), (status, end)]
    answer = fake.run("generate", "--request-id", "job-1")
    assert answer.exit_code == 1
    assert message in answer.output


def test_waiting_survives_an_api_that_is_away_for_a_moment(fake: FakeApi) -> None:
    fake.polls = [(503, {"detail": "Redis is away"}), (200, running(1)), (502, b""), (200, RESULT)]
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0-2")
    assert answer.exit_code == 0, answer.output


def test_ctrl_c_says_how_to_fetch_the_result_later(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    fake.polls = [(200, running(1))]
    monkeypatch.setattr(client.time, "sleep", interrupt)
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0-2")
    assert answer.exit_code == 130
    assert f"proofline generate --url {fake.url} --request-id job-1" in answer.output
    assert f"curl {fake.url}/api/v1/pow/generate/job-1" in answer.output


def test_nobody_listening_is_one_clear_line(runner: CliRunner) -> None:
    answer = runner.invoke(
        app, ["generate", "--url", "http://127.0.0.1:9", *PROOF_OPTIONS, "--nonces", "1"]
    )
    assert answer.exit_code == 1
    assert "No answer from http://127.0.0.1:9" in answer.output
    assert "is `proofline up` running there?" in answer.output


@pytest.mark.parametrize("bad", ["", "ftp://127.0.0.1", "http://", "http://[::1"])
def test_a_url_that_is_none_is_a_usage_error(runner: CliRunner, bad: str) -> None:
    answer = runner.invoke(app, ["generate", "--url", bad, *PROOF_OPTIONS, "--nonces", "1"])
    assert answer.exit_code == 2
    assert "--url" in answer.output


def test_generate_with_max_tokens_asks_for_chains(fake: FakeApi) -> None:
    fake.polls = [(200, {**RESULT, "artifacts": CHAINS})]
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0-2", "--max-tokens", "2")
    assert answer.exit_code == 0, answer.output
    params = {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12, "decode": True, "max_tokens": 2}
    assert fake.submitted[0]["params"] == params
    assert json.loads(answer.stdout)["request"]["params"] == params
