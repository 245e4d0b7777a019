"""The stack of a campaign: its Redis has a proxy and maybe a small disk, its clock can be set."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from bench.faults.proxy import Proxy
from cli.supervise.processes import Child
from cli.supervise.stack import Stack

DISK_MIB = 2048  # of memory, when the disk is full
_CLOCK_FOLDER = Path(__file__).parent / "clock"


class FaultyStack(Stack):
    """A stack whose processes connect to Redis through `proxy`."""

    proxy: Proxy
    own_url: str  # of Redis itself

    def _start_redis(self) -> None:
        super()._start_redis()
        self.own_url = self.redis_url or ""
        parts = urlsplit(self.own_url)
        self.proxy = Proxy((parts.hostname or "", parts.port or 0)).__enter__()
        self.redis_url = self.own_url.replace(f":{parts.port}/", f":{self.proxy.port}/")

    def children(self, kind: str = "") -> list[Child]:
        """Returns the running processes whose name begins with `kind`, such as "worker"."""
        return [
            child for child in self._children() if child.spec.name.startswith(kind) and child.pid
        ]

    def stop(self) -> None:
        super().stop()
        if hasattr(self, "proxy"):
            self.proxy.__exit__()


class MovedClock:
    """The clock of all processes that are started with `env`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    @property
    def env(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(_CLOCK_FOLDER), "PROOFLINE_TEST_CLOCK": str(self._file)}

    def set(self, ahead_s: float) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(str(ahead_s))
        new.rename(self._file)


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a disk of DISK_MIB at `folder`; yields whether this user may mount."""
    folder.mkdir(exist_ok=True)
    options = f"size={DISK_MIB}m,mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "proofline-faults", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> Path:
    """Fills a disk; returns the file that takes the space."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**20))
    return filler
