"""`proofline config`: values, where they come from, and what is hidden."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cli.examine import sources
from cli.main import app
from poc_core.settings import Settings
from tests.harness.documents import ROOT

SECRET = "a-secret-of-16-characters"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.chdir(tmp_path)
    for name in sources.OTHERS:
        monkeypatch.delenv(name, raising=False)
    return CliRunner()


def shown(runner: CliRunner, *options: str) -> dict[str, tuple[object, str]]:
    answer = runner.invoke(app, ["config", "--json", *options])
    assert answer.exit_code == 0, answer.output
    assert SECRET not in answer.output
    return {
        entry["name"]: (entry["value"], entry["source"])
        for entry in json.loads(answer.stdout)["settings"]
    }


def test_every_setting_is_shown_with_its_default(runner: CliRunner) -> None:
    found = shown(runner)
    assert list(found) == [f"POC_{name.upper()}" for name in Settings.model_fields]
    assert found["POC_BATCH_SIZE_DEFAULT"] == (32, "default")
    assert found["POC_CALLBACK_MAX_RETRIES"] == (None, "default")
    assert {source for _, source in found.values()} == {"default"}


def test_the_environment_is_told_apart(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_BATCH_SIZE_DEFAULT", "8")
    monkeypatch.setenv("poc_max_waiting_requests", "9")  # pydantic reads any case
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("PROOFLINE_URL", "http://node:8000")
    assert shown(runner, "--changed") == {
        "POC_BATCH_SIZE_DEFAULT": (8, "environment"),
        "POC_MAX_WAITING_REQUESTS": (9, "environment"),
        "PROOFLINE_URL": ("http://node:8000", "environment"),
        "HF_TOKEN": ("***", "environment"),
    }


def test_compose_s_file_is_told_apart(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text(
        "POC_MAX_WAITING_REQUESTS=7\nexport POC_CHAT_POLICY='off'\n# POC_MAX_STEP_MS=1\n"
    )
    monkeypatch.setenv("POC_CHAT_POLICY", "off")
    found = shown(runner, "--changed")
    assert found["POC_CHAT_POLICY"] == ("off", "environment, as .env has it")
    assert found["POC_MAX_WAITING_REQUESTS"] == (
        256,
        "default; .env sets it for Compose's containers only",
    )
    assert len(found) == 2


def test_secrets_are_hidden(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POC_API_KEY", SECRET)
    monkeypatch.setenv("POC_REDIS_URL", f"redis://user:{SECRET}@host:1/0?password={SECRET}&db=2")
    found = shown(runner, "--changed")
    assert found["POC_API_KEY"] == ("***", "environment")
    assert found["POC_REDIS_URL"] == ("redis://***@host:1/0?password=***&db=2", "environment")


def test_a_password_from_a_file_is_told_and_hidden(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET)
    monkeypatch.setenv("POC_REDIS_PASSWORD_FILE", str(file))
    found = shown(runner, "--changed")
    assert found["POC_REDIS_URL"] == (
        "redis://***@127.0.0.1:6379/0",
        "default, password from POC_REDIS_PASSWORD_FILE",
    )
    assert found["POC_REDIS_PASSWORD_FILE"] == (str(file), "environment")


def test_for_people_it_is_lines_and_misspelt_names_are_told(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POC_CHAT_POLCY", "off")
    monkeypatch.setenv("POC_MAX_WAITING_REQUESTS", "9")
    answer = runner.invoke(app, ["config"])
    assert "POC_CHAT_POLICY = yield\n" in answer.stdout
    assert "POC_MAX_WAITING_REQUESTS = 9    # environment\n" in answer.stdout
    assert "POC_CALLBACK_MAX_RETRIES = unset\n" in answer.stdout
    assert "POC_CHAT_POLCY is no setting; POC_CHAT_POLICY is." in answer.stderr


def test_that_nothing_differs_is_said(runner: CliRunner) -> None:
    answer = runner.invoke(app, ["config", "--changed"], env=dict.fromkeys(sources.OTHERS))
    assert (answer.stdout, answer.stderr) == ("", "Nothing differs from the defaults.\n")


def test_a_value_that_cannot_be_used_is_named(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POC_MAX_WAITING_REQUESTS", "many")
    answer = runner.invoke(app, ["config"])
    assert answer.exit_code == 2
    assert "POC_MAX_WAITING_REQUESTS" in answer.stderr


def test_what_is_no_url_and_a_file_that_cannot_be_read_are_no_errors(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POC_HOST_NAME", f"http://user:{SECRET}@[::1")
    (tmp_path / ".env").write_bytes(b"POC_MAX_WAITING_REQUESTS=7\n# \xff\n")
    found = shown(runner)
    assert found["POC_HOST_NAME"] == ("***", "environment")
    assert ".env sets it" in found["POC_MAX_WAITING_REQUESTS"][1]
    monkeypatch.setattr(Path, "read_text", denied)
    assert found.keys() == shown(runner).keys()


def denied(*_: object, **__: object) -> str:
    raise PermissionError(13, "Permission denied")


def test_config_shows_each_variable_that_the_page_lists(runner: CliRunner) -> None:
    """The backup of a node's settings is what `proofline config --changed` prints."""
    page = (ROOT / "docs" / "settings.md").read_text()
    table = page.partition("Other variables that processes read:")[2]
    listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert len(listed) > 5
    answer = runner.invoke(app, ["config", "--changed"], env=dict.fromkeys(listed, "given"))
    found = {line.partition(" = ")[0] for line in answer.stdout.splitlines()}
    assert [name for name in listed if name not in found] == []


@pytest.mark.parametrize("command", ["api", "courier", "workers"])
def test_each_container_of_compose_names_misspelt_settings(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POC_REQUIRE_KEY", "always")
    monkeypatch.setattr("cli.run.api.bound", port_that_is_free)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_args: None)
    monkeypatch.setattr("cli.run.courier.run_courier", lambda _url: None)
    monkeypatch.setattr("cli.run.courier.end_process", lambda: None)
    stops_at_once = ["--rank", "1"] if command == "workers" else []
    said = CliRunner().invoke(app, [command, *stops_at_once]).stderr
    assert f"{command}: POC_REQUIRE_KEY is no setting; POC_REQUIRE_KEYS is.\n" in said


def port_that_is_free(host: str, port: int) -> SimpleNamespace:
    return SimpleNamespace(getsockname=lambda: (host, port))
