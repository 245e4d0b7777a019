"""An engine's options on the command line: one set for all commands, handed on whole."""

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.engine_options import from_command_line
from cli.main import app
from cli.shipped import shipped_models
from poc_core.schemes.decode.codebook_file import NETWORK_SHA256, SHIPPED
from workers.engines.options import EngineOptions

FLAGS = (
    *(
        "--model",
        "--engine",
        "--dtype",
        "--tensor-parallel",
        "--pipeline-parallel",
        "--max-batch-tokens",
    ),
    *("--served-model-name", "--synthetic-step-ms"),
)


@pytest.mark.parametrize("command", ["up", "compute"])
def test_the_help_names_every_shipped_model(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "500"}).output
    assert set(shipped_models()) <= set(re.findall(r"[\w-]+", shown))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `run_worker` is called with, in place of a worker."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setitem(
        sys.modules, "workers.main", SimpleNamespace(run_worker=lambda *args: calls.append(args))
    )
    monkeypatch.setattr("cli.run.worker.end_process", lambda: None)
    return calls


def test_the_command_line_knows_every_option_and_its_default() -> None:
    on_command_line = inspect.signature(from_command_line).parameters
    # What all workers of a node are to share is a setting; over several hosts `workers` alone runs.
    shared = {"codebook", "logprob_tokens", "validation", "span"}
    fields = {
        name: field for name, field in EngineOptions.model_fields.items() if name not in shared
    }
    assert set(on_command_line) == set(fields)
    for name, field in fields.items():
        default = on_command_line[name].default
        assert (
            field.is_required()
            if default is inspect.Parameter.empty
            else (default or ()) == (field.default or ())
        )


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        *((command, FLAGS) for command in ("up", "workers", "worker")),
        ("compute", FLAGS[:-2]),
        ("calibrate", FLAGS[:-2]),
    ],
)
def test_every_command_that_starts_an_engine_takes_them(
    monkeypatch: pytest.MonkeyPatch, command: Any, flags: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    help_text = CliRunner().invoke(app, [command, "--help"]).output
    assert [flag for flag in FLAGS if f" {flag} " in help_text] == list(flags)
    assert "VLLM_ARGS" in help_text


def test_a_worker_gets_what_was_said(started: list[tuple[Any, ...]]) -> None:
    flags = [
        "--engine",
        "synthetic",
        "--synthetic-step-ms",
        "5",
        "--served-model-name",
        "m",
        "--max-batch-tokens",
        "9",
    ]
    done = CliRunner().invoke(app, ["worker", "--model", "tiny-qwen3", *flags, "--worker-id", "w"])
    assert done.exit_code == 0
    options = EngineOptions(
        model=str(shipped_models()["tiny-qwen3"]),
        served_model_name="m",
        engine="synthetic",
        synthetic_step_ms=5,
        max_batch_tokens=9,
    )
    assert started == [(options, "w", None)]


@pytest.mark.parametrize(
    ("setting", "option", "default", "other"),
    [
        ("POC_LOGPROB_TOKENS", "logprob_tokens", "ids", "text"),
        ("POC_VALIDATION", "validation", "auto", "steps"),
    ],
)
def test_how_chat_is_answered_and_checked_are_settings_of_the_node(
    started: list[tuple[Any, ...]], setting: str, option: str, default: str, other: str
) -> None:
    command = ["worker", "--model", "tiny-qwen3", "--engine", "synthetic"]
    for env, expected in (({}, default), ({setting: other}, other)):
        assert CliRunner().invoke(app, command, env=env).exit_code == 0
        assert getattr(started[-1][0], option) == expected


def test_a_codebook_with_another_checksum_ends_the_command_before_an_engine_is_loaded(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def worker() -> Any:
        flags = ["worker", "--model", "tiny-qwen3", "--engine", "synthetic"]
        return CliRunner().invoke(app, flags)

    (tmp_path / "other").write_bytes(b"other")
    monkeypatch.setenv("POC_DECODE_CODEBOOK", str(tmp_path / "other"))
    done = worker()
    assert done.exit_code == 2
    assert f"the network's own (POC_DECODE_CODEBOOK) has {NETWORK_SHA256}" in done.stderr
    assert started == []
    monkeypatch.setenv("POC_DECODE_CODEBOOK", str(SHIPPED))
    assert worker().exit_code == 0
    assert started[0][0].codebook == str(SHIPPED)


def test_a_supervised_worker_gets_them_whole(started: list[tuple[Any, ...]]) -> None:
    options = EngineOptions(
        model="/models/m", served_model_name="m", tensor_parallel=2, vllm_args=("--seed", "1")
    )
    assert CliRunner().invoke(app, ["supervised-worker", options.model_dump_json()]).exit_code == 0
    assert started == [(options, None, None)]


@pytest.mark.parametrize("command", ["worker", "up", "workers"])
@pytest.mark.parametrize(
    "flags",
    [
        ["--engine", "synthetic", "--tensor-parallel", "2"],
        ["--engine", "transformers", "--", "--seed", "1"],
    ],
)
def test_what_does_not_go_together_is_one_line(
    started: list[tuple[Any, ...]], command: str, flags: Any
) -> None:
    done = CliRunner().invoke(app, [command, "--model", "tiny-qwen3", *flags])
    assert done.exit_code == 2
    assert (
        done.stderr
        == f"error: Parallelism and arguments after -- are vLLM's; the {flags[1]} engine takes"
        " neither.\n"
    )
    assert started == []
