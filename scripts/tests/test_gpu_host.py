"""What `scripts/gpu_host/rows.toml` is to run is there; changes of that file; what pack removes."""

import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app as proofline
from scripts.gpu_host import lanes, pack

COMMANDS: Any = typer.main.get_command(proofline)
ROWS = lanes.HERE / "rows.toml"


@pytest.mark.parametrize("row", lanes.rows_of(ROWS, []), ids=lambda row: row.name)
def test_what_a_gpu_host_is_to_run_exists(row: lanes.Row) -> None:
    """Modules, files and options: a lent host's minutes are not for finding a wrong word."""
    python, dash, module, *words = shlex.split(row.command)
    assert (python, dash) == ("python3", "-m")
    if module == "cli.main":
        COMMANDS.commands[words[0]].make_context(words[0], words[1:])
    elif module.startswith("bench.") and not module.startswith("bench.poison."):
        app = typer.Typer()
        app.command()(importlib.import_module(module).main)
        typer.main.get_command(app).make_context(module, words)
    elif module.startswith(("bench.poison.", "scripts.")):
        source = Path(*module.split(".")).with_suffix(".py").read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))
    else:
        assert module == "pytest"
        assert all(Path(word).exists() for word in words if word.startswith("tests/"))


def test_a_file_of_rows_that_is_just_being_replaced_does_not_end_the_plan(tmp_path: Path) -> None:
    """An editor that saves renames the file first: the GPUs would be idle from then on."""
    file = tmp_path / "rows.toml"
    file.write_text('[[row]]\nname = "one"\ncommand = "true"\nlimit_s = 1\n')
    plan = lanes.Plan(file, [])
    saved = file.rename(tmp_path / "rows.toml~").read_text()
    plan.read_again([])
    file.write_text(saved.replace("one", "two"))
    assert plan.read_again([]) == ""
    assert [row.name for row in plan.waiting] == ["two"]


def test_packing_removes_no_folder_with_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "thesis.txt"
    mine.touch()
    (tmp_path / "c1").mkdir()
    monkeypatch.setattr(sys, "argv", ["pack", str(tmp_path), "0.25.1"])
    monkeypatch.setattr(pack, "pip", lambda *_: pytest.fail("nothing may be fetched"))
    with pytest.raises(SystemExit, match=r"thesis\.txt"):
        pack.main()
    assert mine.exists()
