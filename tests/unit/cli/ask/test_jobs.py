"""`generate` and `validate` against a stand-in for the API."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.ask.validate import describe_verdict
from cli.main import app
from proofline.client import exchange
from proofline.client import sync as client
from tests.harness.samples import status_answer

ARTIFACTS = [{"nonce": nonce, "vector_b64": f"vector{nonce}"} for nonce in range(3)]
ENCODING = {"dtype": "f16", "k_dim": 12, "endian": "le"}
RESULT = {
    "status": "completed",
    "request_id": "job-1",
    "artifacts": ARTIFACTS,
    "encoding": ENCODING,
}
PROOF_OPTIONS = ["--block-hash", "0xabc", "--public-key", "node-1"]


def running(done: int) -> dict[str, Any]:
    return {"status": "running", "request_id": "job-1", "n_done": done, "n_total": 3}


def verdict(n_mismatch: int, fraud: bool) -> dict[str, Any]:
    return {
        "status": "completed",
        "request_id": "job-1",
        "n_total": 3,
        "n_mismatch": n_mismatch,
        "mismatch_nonces": list(range(n_mismatch)),
        "p_value": 1e-6 if fraud else 1.0,
        "fraud_detected": fraud,
        "n_excluded": 0,
    }


class FakeApi:
    """Answers a submission, then each poll with the next of `polls`; the last one repeats."""

    def __init__(self, runner: CliRunner) -> None:
        self.runner, self.url = runner, ""
        self.models = ["tiny-qwen3"]
        self.submission: tuple[int, Any] = (
            200,
            {"status": "queued", "request_id": "job-1", "queued_count": 3},
        )
        self.polls: list[tuple[int, Any]] = [(200, RESULT)]
        self.submitted: list[dict[str, Any]] = []
        self.polled: list[str] = []

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/api/v1/pow/status":
            return 200, status_answer(self.models)
        if method == "POST" and path == "/api/v1/pow/generate":
            self.submitted.append(body)
            return self.submission
        if path.startswith("/api/v1/pow/generate/"):
            self.polled.append(path.rpartition("/")[2])
            return self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        return 404, {"detail": "Not Found"}

    def run(self, command: str, *words: str, input: str | None = None) -> Result:
        return self.runner.invoke(app, [command, "--url", self.url, *words], input=input)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setattr(exchange, "FIRST_POLL_S", 0.01)
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


@pytest.fixture
def fake(runner: CliRunner) -> Iterator[FakeApi]:
    fake = FakeApi(runner)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, document = fake.answer(self.command, self.path, body)
            payload = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        yield fake
        server.shutdown()
        thread.join()


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """A file as `generate` writes it."""
    path = tmp_path / "proof.json"
    request = {
        "block_hash": "0xfile",
        "public_key": "key-of-file",
        "block_height": 7,
        "params": {"model": "tiny-llama", "seq_len": 32, "k_dim": 8},
        "poc_stronger_rng": True,
    }
    path.write_text(json.dumps({**RESULT, "request": request}))
    return path


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


@pytest.mark.parametrize("words", [[], ["a.json", "--artifacts", "b.json"]])
def test_validate_wants_one_file(runner: CliRunner, words: list[str]) -> None:
    answer = runner.invoke(app, ["validate", *words])
    assert answer.exit_code == 2
    assert "Name one file, as `proofline generate` wrote it" in answer.stderr


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
    ("end", "message"),
    [
        (
            {"status": "failed", "error": "the engine was lost"},
            "Job job-1 failed: the engine was lost",
        ),
        ({"status": "cancelled"}, "Job job-1 was cancelled"),
    ],
)
def test_a_job_without_a_result_is_a_failure(
    fake: FakeApi, end: dict[str, Any], message: str
) -> None:
    fake.polls = [(200, running(1)), (200, end)]
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "1")
    assert answer.exit_code == 1
    assert message in answer.output


def test_waiting_survives_an_api_that_is_away_for_a_moment(fake: FakeApi) -> None:
    fake.polls = [(503, {"detail": "Redis is away"}), (200, running(1)), (502, b""), (200, RESULT)]
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0-2")
    assert answer.exit_code == 0, answer.output


def test_an_expired_job_is_not_waited_for(fake: FakeApi) -> None:
    fake.polls = [(404, {"detail": "There is no job 'job-1'."})]
    answer = fake.run("generate", "--request-id", "job-1")
    assert answer.exit_code == 1
    assert "There is no job 'job-1'. (HTTP 404)" in answer.output


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


def test_validate_sends_the_artifacts_and_finds_no_fraud(fake: FakeApi, proof: Path) -> None:
    fake.polls = [(200, verdict(0, fraud=False))]
    answer = fake.run("validate", str(proof))
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout) == verdict(0, fraud=False)
    assert "No fraud: 0 of 3 artifacts mismatch, p-value 1." in answer.stderr
    assert fake.submitted == [
        {
            "block_hash": "0xfile",
            "block_height": 7,
            "public_key": "key-of-file",
            "node_id": 0,
            "node_count": 1,
            "nonces": [0, 1, 2],
            "params": {"model": "tiny-llama", "seq_len": 32, "k_dim": 8},
            "poc_stronger_rng": True,
            "validation": {"artifacts": ARTIFACTS},
            "wait": False,
        }
    ]


def test_options_override_what_the_file_says(fake: FakeApi, proof: Path) -> None:
    fake.polls = [(200, verdict(0, fraud=False))]
    options = [
        *PROOF_OPTIONS,
        "--model",
        "m",
        "--seq-len",
        "16",
        "--k-dim",
        "4",
        "--no-stronger-rng",
        "--nonces",
        "2,0",
    ]
    answer = fake.run("validate", "--artifacts", str(proof), *options)
    assert answer.exit_code == 0, answer.output
    (body,) = fake.submitted
    assert (body["block_hash"], body["public_key"], body["nonces"]) == ("0xabc", "node-1", [2, 0])
    assert body["params"] == {"model": "m", "seq_len": 16, "k_dim": 4}
    assert body["poc_stronger_rng"] is False
    assert body["validation"]["artifacts"] == [ARTIFACTS[2], ARTIFACTS[0]]


def test_fraud_has_an_exit_code_of_its_own(fake: FakeApi, proof: Path) -> None:
    fake.polls = [(200, verdict(2, fraud=True))]
    answer = fake.run("validate", "--artifacts", str(proof))
    assert answer.exit_code == 3
    assert json.loads(answer.stdout)["fraud_detected"] is True
    assert "FRAUD: 2 of 3 artifacts mismatch, p-value 1e-06." in answer.stderr


def test_validate_takes_what_compute_writes_and_reads_stdin(fake: FakeApi) -> None:
    fake.polls = [(200, verdict(0, fraud=False))]
    computed = json.dumps({"artifacts": ARTIFACTS, "encoding": {**ENCODING, "k_dim": 5}})
    answer = fake.run("validate", "--artifacts", "-", *PROOF_OPTIONS, input=computed)
    assert answer.exit_code == 0, answer.output
    assert fake.submitted[0]["params"] == {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "holds no artifacts"),
        ("5", "holds no artifacts"),
        ('{"artifacts": [{"nonce": "one", "vector_b64": "x"}]}', "holds no artifacts"),
        (
            '[{"nonce": 1, "vector_b64": "x"}]',
            "does not say what it was made for; give --block-hash and --public-key",
        ),
    ],
)
def test_a_file_that_cannot_be_validated_is_a_usage_error(
    fake: FakeApi, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    answer = fake.run("validate", "--artifacts", str(path))
    assert answer.exit_code == 2
    assert message in answer.output


def test_a_missing_file_is_a_usage_error(fake: FakeApi, tmp_path: Path) -> None:
    answer = fake.run("validate", "--artifacts", str(tmp_path / "none.json"))
    assert answer.exit_code == 2
    assert "Cannot read" in answer.output


def test_a_nonce_that_the_file_does_not_have_is_a_usage_error(fake: FakeApi, proof: Path) -> None:
    answer = fake.run("validate", "--artifacts", str(proof), "--nonces", "0,9")
    assert answer.exit_code == 2
    assert "The file has no artifact of nonce 9" in answer.output


CHAINS = [
    {"nonce": nonce, "vector_b64": "", "k_points_steps": [3, 14, nonce]} for nonce in range(3)
]


def test_generate_with_max_tokens_asks_for_chains(fake: FakeApi) -> None:
    fake.polls = [(200, {**RESULT, "artifacts": CHAINS})]
    answer = fake.run("generate", *PROOF_OPTIONS, "--nonces", "0-2", "--max-tokens", "2")
    assert answer.exit_code == 0, answer.output
    params = {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12, "decode": True, "max_tokens": 2}
    assert fake.submitted[0]["params"] == params
    assert json.loads(answer.stdout)["request"]["params"] == params


@pytest.mark.parametrize("noted", [{}, {"request": {"params": {"decode": True, "max_tokens": 2}}}])
def test_validate_knows_chains_and_judges_them_by_their_own_threshold(
    fake: FakeApi, noted: dict[str, Any]
) -> None:
    fake.polls = [(200, verdict(0, fraud=False))]
    document = json.dumps(
        {"artifacts": [*CHAINS[:2], {**CHAINS[2], "k_points_steps": [1]}], **noted}
    )
    answer = fake.run("validate", "--artifacts", "-", *PROOF_OPTIONS, input=document)
    assert answer.exit_code == 0, answer.output
    (body,) = fake.submitted
    assert (body["params"]["decode"], body["params"]["max_tokens"]) == (True, 2)
    assert "stat_test" not in body


def test_validate_sends_the_terms_that_are_named(fake: FakeApi, proof: Path) -> None:
    fake.polls = [(200, verdict(0, fraud=False))] * 2
    for file in (proof.read_text(), json.dumps({"artifacts": CHAINS})):
        words = ["-", *PROOF_OPTIONS, "--p-mismatch", "0.2"]
        assert fake.run("validate", *words, input=file).exit_code == 0
    assert [body["stat_test"] for body in fake.submitted] == [
        {"p_mismatch": 0.2},
        {"p_mismatch": 0.2, "dist_threshold": 0.025},
    ]


def test_validate_takes_options_for_chains(fake: FakeApi) -> None:
    fake.polls = [(200, verdict(0, fraud=False))]
    options = [*PROOF_OPTIONS, "--max-tokens", "5", "--dist-threshold", "0.04"]
    document = json.dumps({"artifacts": CHAINS})
    assert fake.run("validate", "--artifacts", "-", *options, input=document).exit_code == 0
    assert fake.submitted[0]["params"]["max_tokens"] == 5
    assert fake.submitted[0]["stat_test"]["dist_threshold"] == 0.04


def test_a_verdict_is_told_with_what_it_rests_on() -> None:
    told = describe_verdict(
        verdict(12, fraud=True)
        | {
            "distances": {"min": 0.001, "median": 1.4, "max": 1.6},
            "dist_threshold": 0.02,
            "p_mismatch": 0.1,
            "fraud_threshold": 0.05,
            "terms": "the request",
            "likely_cause": "Another key.",
        }
    )
    assert told.splitlines()[1:] == [
        "Distances 0.0010 to 1.6000, median 1.4000; the threshold is 0.02.",
        "Terms: dist_threshold 0.02, p_mismatch 0.1, fraud_threshold 0.05 (the request).",
        "Nonces that mismatch: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more.",
        "Likely cause: Another key.",
    ]
