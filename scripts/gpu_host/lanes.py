"""Runs the rows of rows.toml on a GPU host: each on as many GPUs as it wants, when they are free.

    setsid nohup python3 -m scripts.gpu_host.lanes run &   # in a copy of this checkout
    python3 -m scripts.gpu_host.lanes show 50              # waits 50 s, then prints the progress
    python3 -m scripts.gpu_host.lanes show 1 --caches      # also copies compiled kernels

This keeps a rented host busy: the first rows run while the packages of the next release are copied.
Rows start in their order, and a row that waits delays the following rows. Changes of the file apply
to a running plan: new rows are added, removed rows are ended, and limits are updated. `show` copies
all logs to the folder $OUT. Needs only Python 3.12.

A row has a `name`, a `command` for bash, and a `limit_s`, after which it is ended. It may have
`gpus` (the number, 1 by default; 0.5: half of one; 0: none), a `release` of vLLM (the row waits
until all pieces are in ~/up, and unpacks them), and `env`, further environment variables.
"""

import argparse
import os
import shlex
import signal
import subprocess
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
UP = Path("~/up").expanduser()
LOGS = Path("~/logs").expanduser()
# Caches of kernels that vLLM, Triton, TileLang and DeepGEMM compile.
CACHES = ("~/.cache/vllm", "~/.triton/cache", "~/.tilelang/cache", "~/.deep_gemm")
FILE_MB = 15  # size of the pieces that a rented host sends back
POLL_S = 0.5
END_S = 15.0  # until an interrupted row is killed
MARK = "PROOFLINE_ROW"  # in the environment of all processes of a row


class Row(NamedTuple):
    """One command to run, as described above."""

    name: str
    command: str
    limit_s: float
    gpus: float = 1
    release: str = ""
    env: Mapping[str, str] = {}

    def is_ready(self, up: Path) -> bool:
        return not self.release or (up / f"{self.release}.complete").exists()


class Job:
    """A running row."""

    def __init__(self, row: Row, taken: dict[int, float], logs: Path) -> None:
        self.row, self.taken = row, taken  # part by GPU
        self.began = time.monotonic()
        self._log = logs / f"{row.name}.log"
        paths = (ROOT, _registered(logs), *filter(None, [os.environ.get("PYTHONPATH")]))
        given = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, taken)),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            MARK: row.name,
        }
        files = (f"unpack.sh {row.release}", "installed.sh") if row.release else ()
        source = "".join(f"source {HERE}/{file}; " for file in files)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", source + row.command],
                env={**os.environ, **given, **row.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def outcome(self) -> str:
        """Ends all processes of a row that is done or too late; returns how it ended, or empty."""
        code = self._process.poll()
        took_s = time.monotonic() - self.began
        if code is None and took_s < self.row.limit_s:
            return ""
        if code is None:
            _signal(self._pids(), signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        _signal(self._pids(), signal.SIGKILL)
        self._process.wait()
        return f"{f'exit code {code}' if code is not None else 'CUT'} after {took_s:.0f} s"

    def _pids(self) -> Iterator[int]:
        """Yields all processes of the row, including those that left its session."""
        mark = f"{MARK}={self.row.name}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


def _registered(logs: Path) -> Path:
    """Returns a folder with metadata by which vLLM finds this checkout's plugin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    folder = logs / "registered" / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, found in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{one} = {where}" for one, where in found.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder.parent


def _signal(pids: Iterator[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def rows_of(file: Path, names: Sequence[str]) -> list[Row]:
    """Returns the rows of a file, or those named. SystemExit: a row or a name is wrong."""
    try:
        found = [Row(**row) for row in tomllib.loads(file.read_text())["row"]]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise SystemExit(f"{file}: {error}. See `--help`.") from error
    by_name = {row.name: row for row in found}
    if unknown := set(names) - set(by_name):
        raise SystemExit(f"{file} has no row {', '.join(unknown)}; it has {', '.join(by_name)}.")
    return [by_name[name] for name in names or by_name]


def part_of(gpus: float, free: Mapping[int, float]) -> dict[int, float] | None:
    """Returns the GPUs of a row and the part of each; None if the row must wait."""
    part = min(gpus, 1.0)
    fitting = sorted((left, gpu) for gpu, left in free.items() if left >= part)
    n = max(1, round(gpus))
    return {gpu: part for _, gpu in fitting[:n]} if len(fitting) >= n else None


class Plan:
    """The rows of a file, or those named, and later changes of the file."""

    def __init__(self, file: Path, names: Sequence[str]) -> None:
        self.waiting = rows_of(file, names)
        self._known = {row.name for row in rows_of(file, [])}
        self._file, self._read_at = file, file.stat().st_mtime_ns

    def read_again(self, running: Sequence[Job]) -> str:
        """Applies changes of the file; returns why the file is wrong, or empty."""
        try:
            read_at = self._file.stat().st_mtime_ns
        except OSError:  # an editor that saves has renamed it
            return ""
        if read_at == self._read_at:
            return ""
        self._read_at = read_at
        try:
            now = {row.name: row for row in rows_of(self._file, [])}
        except SystemExit as error:
            return str(error)
        waiting = {row.name for row in self.waiting}
        self.waiting = [
            row for name, row in now.items() if name in waiting or name not in self._known
        ]
        self._known |= now.keys()
        for job in running:
            job.row = now.get(job.row.name, job.row._replace(limit_s=0))
        return ""


def run(plan: Plan, n_gpus: int, up: Path, logs: Path) -> None:
    """Runs all rows to their ends."""
    logs.mkdir(parents=True, exist_ok=True)
    began, free = time.monotonic(), dict.fromkeys(range(n_gpus), 1.0)
    running = list[Job]()
    with (logs / "lanes.txt").open("a", buffering=1) as told:

        def tell(words: str) -> None:
            told.write(f"{time.monotonic() - began:6.0f} s  {words}\n")

        while plan.waiting or running:
            if why_not := plan.read_again(running):
                tell(why_not)
            for job in running.copy():
                if outcome := job.outcome():
                    running.remove(job)
                    tell(f"{job.row.name}: {outcome}")
                    for gpu, part in job.taken.items():
                        free[gpu] += part
            waiting = plan.waiting
            if waiting and waiting[0].gpus > n_gpus:
                tell(f"{waiting[0].name}: left out, wants {waiting.pop(0).gpus:g} GPUs")
            elif waiting and waiting[0].is_ready(up) and (taken := part_of(waiting[0].gpus, free)):
                for gpu, part in taken.items():
                    free[gpu] -= part
                running.append(Job(waiting.pop(0), taken, logs))
                tell(f"{running[-1].row.name}: on GPU {', '.join(map(str, taken))}")
            else:
                time.sleep(POLL_S)
        tell("all rows have ended")


def show(seconds: float, logs: Path, out: Path | None, caches: bool) -> None:
    """Waits, prints the last lines of each log, and copies all logs to `out`."""
    until = time.monotonic() + seconds
    lanes = logs / "lanes.txt"
    while time.monotonic() < until and "all rows have ended" not in _text(lanes):
        time.sleep(POLL_S)
    print(_text(lanes))
    for log in sorted(logs.glob("*.log"), key=lambda path: path.stat().st_mtime)[-4:]:
        print(f"--- {log.name}", *_text(log).splitlines()[-6:], sep="\n")
    if out is None:
        return
    with tarfile.open(out / "logs.tar.xz", "w:xz") as archive:
        archive.add(logs, "logs")
    if caches:
        found = [str(path) for name in CACHES if (path := Path(name).expanduser()).exists()]
        pieces = f"tar -cPf - {shlex.join(found)} | xz -T0 | split --bytes={FILE_MB}MB -d - caches."
        subprocess.run(["bash", "-c", pieces], cwd=out, check=True)


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=Path, default=LOGS)
    ways = parser.add_subparsers(dest="way", required=True)
    runs = ways.add_parser("run", help="run rows, all or those named")
    runs.add_argument("name", nargs="*")
    runs.add_argument("--rows", type=Path, default=HERE / "rows.toml")
    n_gpus = len([*Path("/dev").glob("nvidia[0-9]*")])
    runs.add_argument("--gpus", type=int, default=n_gpus)
    shows = ways.add_parser("show", help="wait so many seconds, tell, and fill $OUT")
    shows.add_argument("seconds", type=float)
    shows.add_argument("--caches", action="store_true", help="what was compiled, too")
    given = parser.parse_args()
    if given.way == "run":
        run(Plan(given.rows, given.name), given.gpus, UP, given.logs)
    else:
        out = os.environ.get("OUT")
        show(given.seconds, given.logs, Path(out) if out else None, given.caches)


if __name__ == "__main__":
    main()
