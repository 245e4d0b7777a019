"""What the demo does with artifacts and verdicts; the whole of it runs in `make demo`."""

import importlib.util
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.supervise.demo import TAMPERED_EVERY, DemoError, command, row_of, show, tampered

ARTIFACTS = [{"nonce": nonce, "vector_b64": f"v{nonce}"} for nonce in range(64)]


def verdict(n_mismatch: int, fraud: bool) -> dict[str, Any]:
    return {"n_mismatch": n_mismatch, "n_total": 64, "p_value": 0.5, "fraud_detected": fraud}


def test_the_forgery_is_a_well_formed_copy_with_some_vectors_of_others() -> None:
    forged = tampered(ARTIFACTS)
    changed = [index for index in range(64) if forged[index] != ARTIFACTS[index]]
    assert changed == list(range(0, 64, TAMPERED_EVERY))
    assert [item["nonce"] for item in forged] == list(range(64))
    assert {item["vector_b64"] for item in forged} < {item["vector_b64"] for item in ARTIFACTS}
    assert ARTIFACTS[0]["vector_b64"] == "v0"


@pytest.mark.parametrize(("n_mismatch", "fraud"), [(0, False), (4, True)])
def test_the_expected_verdict_becomes_a_row(n_mismatch: int, fraud: bool) -> None:
    assert row_of(verdict(n_mismatch, fraud), n_mismatch, "copy") == (
        "copy: mismatches, p-value",
        f"{n_mismatch}, 0.5: {'fraud found' if fraud else 'no fraud'}",
    )


@pytest.mark.parametrize(
    ("expected", "seen"), [(0, (1, False)), (0, (4, True)), (4, (4, False)), (4, (3, True))]
)
def test_any_other_verdict_ends_the_demo(expected: int, seen: tuple[int, bool]) -> None:
    with pytest.raises(DemoError, match=f"should show {expected} mismatches"):
        row_of(verdict(*seen), expected, "copy")


def test_the_terms_are_said_to_be_the_demos(capsys: pytest.CaptureFixture[str]) -> None:
    show([("honest copy: mismatches, p-value", "0, 1: no fraud")])
    text = " ".join(capsys.readouterr().out.split())
    assert "Terms of this demo: dist_threshold 0.02, p_mismatch 0.001" in text
    assert "other validations use the network's" in text


def test_a_missing_engine_is_answered_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = CliRunner().invoke(app, ["demo"])
    assert answer.exit_code == 1
    assert "The package vllm is not installed here: run `make setup`" in answer.output


@pytest.mark.parametrize(
    ("path", "venv", "shown"),
    [
        (".venv/bin/proofline", None, ".venv/bin/proofline"),
        ("/a/.venv/bin/proofline", "/a/.venv", "proofline"),
        ("-c", None, "proofline"),
    ],
)
def test_the_next_command_can_be_pasted(
    path: str, venv: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` runs .venv/bin/proofline, which is not on the caller's PATH."""
    monkeypatch.setattr("sys.argv", [path, "demo"])
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    if venv is not None:
        monkeypatch.setenv("VIRTUAL_ENV", venv)
    assert command() == shown
