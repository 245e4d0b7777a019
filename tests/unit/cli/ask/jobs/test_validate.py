"""`proofline validate` against a stand-in for the API."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.ask.validate import describe_verdict
from cli.main import app
from tests.peers.job_api import ARTIFACTS, CHAINS, ENCODING, PROOF_OPTIONS, RESULT, FakeApi


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


@pytest.mark.parametrize("words", [[], ["a.json", "--artifacts", "b.json"]])
def test_validate_wants_one_file(runner: CliRunner, words: list[str]) -> None:
    answer = runner.invoke(app, ["validate", *words])
    assert answer.exit_code == 2
    assert "Name one file, as `proofline generate` wrote it" in answer.stderr


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


def test_a_number_of_steps_alone_makes_artifacts_no_chains(fake: FakeApi) -> None:
    fake.polls = [(200, verdict(0, fraud=False))]
    document = json.dumps({"artifacts": ARTIFACTS, "request": {"params": {"max_tokens": 5}}})
    assert fake.run("validate", "-", *PROOF_OPTIONS, input=document).exit_code == 0
    assert "decode" not in fake.submitted[0]["params"]


@pytest.mark.parametrize("params", [None, []])
def test_without_params_the_file_is_validated_with_the_usual_ones(
    fake: FakeApi, params: Any
) -> None:
    fake.polls = [(200, verdict(0, fraud=False))]
    document = json.dumps({"artifacts": ARTIFACTS, "request": {"params": params}})
    answer = fake.run("validate", "-", *PROOF_OPTIONS, input=document)
    assert answer.exit_code == 0, answer.output
    assert fake.submitted[0]["params"] == {"model": "tiny-qwen3", "seq_len": 256, "k_dim": 12}


def test_a_missing_file_is_a_usage_error(fake: FakeApi, tmp_path: Path) -> None:
    answer = fake.run("validate", "--artifacts", str(tmp_path / "none.json"))
    assert answer.exit_code == 2
    assert "Cannot read" in answer.output


def test_a_nonce_that_the_file_does_not_have_is_a_usage_error(fake: FakeApi, proof: Path) -> None:
    answer = fake.run("validate", "--artifacts", str(proof), "--nonces", "0,9")
    assert answer.exit_code == 2
    assert "The file has no artifact of nonce 9" in answer.output


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


@pytest.mark.parametrize(
    "request_of_file",
    [
        {"per_nonce_reflection": True},  # of `generate`
        {"params": {"scheme": "decode", "max_tokens": 2, "per_nonce_reflection": True}},
    ],
)
def test_chains_are_validated_with_the_reflections_that_the_file_notes(
    fake: FakeApi, request_of_file: dict[str, Any]
) -> None:
    fake.polls = [(200, verdict(0, fraud=False))]
    document = json.dumps({"artifacts": CHAINS, "request": request_of_file})
    answer = fake.run("validate", "-", *PROOF_OPTIONS, input=document)
    assert answer.exit_code == 0, answer.output
    assert fake.submitted[0]["per_nonce_reflection"] is True


@pytest.mark.parametrize(
    "trial",
    [
        (200, {"status": "failed", "request_id": "job-1", "error": "no finite state"}),
        (500, {"detail": "The node failed; its log has the reason."}),
    ],
)
def test_a_mistake_that_cannot_be_tried_leaves_the_verdict(
    fake: FakeApi, proof: Path, trial: tuple[int, Any]
) -> None:
    fake.polls = [(200, verdict(2, fraud=True)), trial]
    answer = fake.run("validate", str(proof), "--explain")
    assert json.loads(answer.stdout) == verdict(2, fraud=True)
    assert answer.exit_code == 3


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
