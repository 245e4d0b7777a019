"""Who may look at Flower."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.run.flower import credentials
from cli.terminal import UsageError
from poc_core.errors import ProoflineError
from poc_core.settings import Settings


@pytest.fixture(autouse=True)
def no_credentials_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLOWER_BASIC_AUTH", "PROOFLINE_FLOWER_PASSWORD_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_password_is_made_up_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = credentials(None), credentials(None)
    assert first != second
    assert first.startswith("proofline:")
    assert len(first) > 20
    assert first in capsys.readouterr().err


def test_flowers_own_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_BASIC_AUTH", "me:secret")
    assert credentials(None) == "me:secret"


def test_the_file_counts_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLOWER_BASIC_AUTH", "me:secret")
    (tmp_path / "password").write_text("from-file\n")
    assert credentials(tmp_path / "password") == "proofline:from-file"


@pytest.mark.parametrize("text", [None, b"", b"a,b", b"\xff\xfe"])
def test_a_file_without_a_password_is_an_error(tmp_path: Path, text: Any) -> None:
    if text is not None:
        (tmp_path / "password").write_bytes(text)
    with pytest.raises(UsageError, match="password"):
        credentials(tmp_path / "password")


@pytest.mark.parametrize(("options", "read_only"), [([], "True"), (["--control"], "False")])
def test_flower_is_started_without_the_password_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch, options: Any, read_only: str
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _path, words: started.append(words))
    monkeypatch.setenv("FLOWER_BASIC_AUTH", "me:secret")
    assert CliRunner().invoke(app, ["flower", "--port", "5566", *options]).exit_code == 0
    (command,) = started
    assert command[:1] == [sys.executable]
    assert {"--address=127.0.0.1", "--port=5566", f"--read_only={read_only}"} <= set(command)
    assert not any("secret" in word for word in command)


def test_a_server_that_can_never_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(settings: Settings) -> None:
        raise ProoflineError(f"POC_REDIS_URL: {settings.redis_url} is a Redis Cluster.")

    monkeypatch.setattr("cli.run.flower.refuse_wrong", wrong)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("Flower was started"))
    done = CliRunner().invoke(app, ["flower", "--redis-url", "redis://other:1/0"])
    assert (done.exit_code, "redis://other:1/0 is a Redis Cluster" in done.output) == (1, True)
