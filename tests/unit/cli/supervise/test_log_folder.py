"""Files for the logs of processes."""

import stat
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.supervise import log_folder
from cli.supervise.foreground import LabelledLog, QuietLog, logs_of_children
from cli.supervise.log_folder import LogFolder
from poc_core.errors import ProoflineError
from tests.harness.commands import shown


def test_each_process_has_a_file_and_the_run_before_one_more(tmp_path: Path) -> None:
    for run in ("first", "second", "third"):
        folder = LogFolder(tmp_path)
        folder.write("redis", f"{run} run")
        folder.write("api", "listens")
        folder.close()
    assert (tmp_path / "logs" / "redis.log").read_text() == "third run\n"
    assert (tmp_path / "logs" / "redis.log.1").read_text() == "second run\n"
    assert (tmp_path / "logs" / "api.log").read_text() == "listens\n"


def test_two_at_a_time_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = LogFolder(tmp_path), LogFolder(tmp_path)
    assert (first.path.name, second.path.name) == ("logs", "logs-2")
    first.close()
    third = LogFolder(tmp_path)
    assert third.path.name == "logs"
    for folder in (second, third):
        folder.close()


def test_a_file_does_not_grow_beyond_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_folder, "MOST_BYTES", 1000)
    folder = LogFolder(tmp_path / "data")
    for number in range(500):
        folder.write("host1/cpu0", f"line {number}")
    folder.close()
    files = sorted(folder.path.glob("worker-cpu0.log*"))
    assert len(files) == 2
    assert all(file.stat().st_size <= 1100 for file in files)
    assert files[0].read_text().endswith("line 499\n")
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


def test_a_log_goes_on_after_its_new_file_could_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_folder, "MOST_BYTES", 1000)
    folder = LogFolder(tmp_path)
    folder.write("api", "x" * 2000)
    away = folder.path.rename(tmp_path / "away")
    folder.write("api", "lost, because the folder is away")
    away.rename(folder.path)
    folder.write("api", "back")
    folder.close()
    assert (folder.path / "api.log").read_text().endswith("back\n")


def test_a_line_after_the_end_is_dropped(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path)
    folder.write("api", "listens")
    folder.close()
    folder.write("api", "late")
    assert (folder.path / "api.log").read_text() == "listens\n"


SEEN = [
    "[2026-11-23 07:07:58,127: WARNING/MainProcess] heartbeat failed and is repeated",
    "[2026-11-23 07:07:58,127: ERROR/MainProcess] The engine hangs",
    "ERROR:    Exception in ASGI application",
    "error: vLLM cannot start",
]


def test_our_own_warnings_are_shown_at_once_and_all_else_is_filed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = [
        "(EngineCore pid=7) WARNING 11-23 07:07:35 [cpu.py:224] Triton is not installed.",
        "[2026-11-23 07:07:58,127: INFO/MainProcess] Connected to redis://",
        "INFO:     Application startup complete.",
        "25505:M 23 Nov 2026 07:07:20.527 # WARNING Memory overcommit must be enabled!",
    ]
    with logs_of_children(verbose=False, parent=tmp_path) as log:
        assert isinstance(log, QuietLog)
        assert str(tmp_path / "logs") in log.where
        for line in [*SEEN, *noise]:
            log("host1/cpu0", line)
    assert capsys.readouterr().err.splitlines() == [f"host1/cpu0 | {line}" for line in SEEN]
    assert (tmp_path / "logs" / "worker-cpu0.log").read_text().splitlines() == [*SEEN, *noise]


def test_an_error_names_the_folder_of_the_logs(tmp_path: Path) -> None:
    def fail() -> None:
        with logs_of_children(verbose=False, parent=tmp_path) as log:
            log("host1/cpu0", "loading")
            raise ProoflineError("too large")

    with pytest.raises(ProoflineError, match=rf"too large\n  .*{tmp_path / 'logs'}"):
        fail()


def test_verbose_shows_all_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logs_of_children(verbose=True, parent=tmp_path) as log:
        log("redis", "starts")
    assert capsys.readouterr().err == "redis    | starts\n"
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_written_all_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with logs_of_children(verbose=False, parent=in_the_way) as log:
        assert isinstance(log, LabelledLog)
        assert "no file can be written" in str(log.where)
        log("redis", "starts")
    assert capsys.readouterr().err == "redis    | starts\n"


def test_logs_go_to_the_stderr_of_their_creation(capsys: pytest.CaptureFixture[str]) -> None:
    log = LabelledLog()
    with redirect_stderr(StringIO()) as replaced:  # as CliRunner does while a stack runs
        log("redis", "starts")
    assert replaced.getvalue() == ""
    assert capsys.readouterr().err == "redis    | starts\n"


def test_lines_of_a_stack_are_not_in_the_output_of_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = shown()
    command = typer.Typer()
    command.command()(lambda: show("vm/cpu0  | nothing to compute"))
    answer = CliRunner().invoke(command)
    assert (answer.exit_code, answer.output) == (0, "")
    assert capsys.readouterr().out == "vm/cpu0  | nothing to compute\n"
