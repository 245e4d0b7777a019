"""The command as a whole: quick help, one-line errors, exit codes."""

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli.main import ProoflineGroup, app
from poc_core.errors import ProoflineError, SpecError
from poc_core.settings import Settings

COMMANDS = (
    *("demo", "up", "api", "worker", "workers", "courier", "flower", "ready"),
    *("round", "status", "generate", "validate", "compute", "calibrate", "bench", "report"),
)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    # Wide, so that no help text is wrapped in the middle of what is looked for.
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_help_lists_every_command(runner: CliRunner) -> None:
    answer = runner.invoke(app, ["--help"])
    assert answer.exit_code == 0
    assert all(command in answer.output for command in COMMANDS)


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that people see, also those below others."""
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from commands_of(below, (*path, name))
    yield path, command


@pytest.mark.parametrize(("path", "command"), [*commands_of(typer.main.get_command(app))])
def test_every_command_explains_itself_and_no_options_name_is_cut_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...], command: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = CliRunner().invoke(app, [*path, "--help"])
    shown = answer.output
    names = [
        name
        for option in command.params
        if not getattr(option, "hidden", False)
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("--")
    ]
    assert answer.exit_code == 0
    assert [name for name in names if name not in shown] == []


@pytest.mark.parametrize(
    ("words", "meant"), [(["statu"], "status"), (["round", "strat"], "start"), (["uup"], "up")]
)
def test_of_a_mistyped_command_the_one_that_may_be_meant_is_told(
    runner: CliRunner, words: list[str], meant: str
) -> None:
    answer = runner.invoke(app, words)
    assert answer.exit_code == 2
    assert f"Did you mean '{meant}'" in answer.stderr


def test_the_version(runner: CliRunner) -> None:
    answer = runner.invoke(app, ["--version"])
    assert answer.exit_code == 0
    assert answer.output == f"proofline {metadata.version('proofline')}\n"


def test_an_unknown_option_is_a_usage_error(runner: CliRunner) -> None:
    assert runner.invoke(app, ["up", "--no-such-option"]).exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["deploy", "\udcff"],
        ["receive", "--host", "\udcff"],
        ["generate", "--block-hash", "\udcff", "--public-key", "n", "--nonces", "0"],
    ],
)
def test_an_argument_that_is_not_utf_8_is_named(runner: CliRunner, words: list[str]) -> None:
    answer = runner.invoke(app, words)
    assert answer.exit_code == 2
    assert r"The argument b'\xff' is not UTF-8" in answer.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--model", "tiny-qwen3", "tiny-llama"],
            "'tiny-llama' is not an option; vLLM's own arguments go to the end, after --.",
        ),
        (["tiny-qwen3"], "'tiny-qwen3' is not an option; a model is named by --model tiny-qwen3"),
    ],
)
def test_words_that_are_no_options_are_told_where_they_go(
    runner: CliRunner, words: list[str], told: str
) -> None:
    answer = runner.invoke(app, ["up", *words])
    assert answer.exit_code == 2
    assert told in answer.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProoflineError("It broke; mend it."), 1),
        (SpecError("k_dim is wrong; correct it."), 2),
        (KeyboardInterrupt(), 130),  # the shells' code for it
    ],
)
def test_an_expected_error_is_one_line_and_an_exit_code(
    runner: CliRunner, error: BaseException, code: int
) -> None:
    small = typer.Typer(cls=ProoflineGroup)

    @small.callback()
    def group() -> None: ...

    @small.command()
    def broken() -> None:
        raise error

    answer = runner.invoke(small, ["broken"])
    assert answer.exit_code == code
    if isinstance(error, ProoflineError):
        assert answer.output == f"error: {error}\n"


@pytest.mark.parametrize("command", ["api", "courier", "ready", "flower", "workers"])
def test_help_tells_where_redis_is_looked_for(runner: CliRunner, command: str) -> None:
    default = Settings.model_fields["redis_url"].default
    assert f"Default: {default}." in runner.invoke(app, [command, "--help"]).output
