"""Processes that vLLM would have started, three generations deep."""

import contextlib
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.waiting import wait_until
from tests.integration.processes import assert_all_gone, is_running
from workers.vllm.start import lifeline

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc"),
]

ROOT = Path(lifeline.__file__).parents[3]
# A worker with an engine core, which has two ranks; a rank holds the lifeline, and the core would
# sleep for ever.
FAMILY = """
import multiprocessing, os, sys, time
from pathlib import Path

def note(name):
    path = Path(sys.argv[1]) / f"{name}-{os.getpid()}"
    path.touch()

def rank(folder):
    sys.argv[1:] = [folder]
    from workers.vllm.start import lifeline
    lifeline.hold()
    note("rank")
    time.sleep(600)

def core(folder):
    sys.argv[1:] = [folder]
    for _ in range(2):
        multiprocessing.get_context("spawn").Process(target=rank, args=(folder,)).start()
    note("core")
    time.sleep(600)

if __name__ == "__main__":
    from workers.vllm.start import lifeline
    lifeline.offer()
    multiprocessing.get_context("spawn").Process(target=core, args=(sys.argv[1],)).start()
    time.sleep(600)
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Any]:
    """(the worker, its descendants' pids)"""
    script, notes = tmp_path / "family.py", tmp_path / "notes"
    script.write_text(FAMILY)
    notes.mkdir()
    worker = subprocess.Popen(
        [sys.executable, script, notes], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

    def noted() -> list[tuple[str, int]]:
        parts = [path.name.partition("-") for path in notes.iterdir()]
        return [(name, int(pid)) for name, _, pid in parts]

    try:
        wait_until(lambda: len(noted()) == 3, "the whole family")
        yield worker, dict(noted()), [pid for _, pid in noted()]
    finally:
        worker.kill()
        worker.wait()
        for _, pid in noted():
            with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile
                os.kill(pid, signal.SIGKILL)


def test_everything_ends_with_a_killed_worker(family: Any) -> None:
    worker, _, pids = family
    worker.kill()
    worker.wait()
    assert_all_gone(pids)


def test_the_ranks_end_with_a_killed_core(family: Any) -> None:
    worker, by_name, pids = family
    os.kill(by_name["core"], signal.SIGKILL)
    assert_all_gone(pids)
    assert worker.poll() is None


def test_nothing_ends_while_the_worker_lives(family: Any) -> None:
    _, _, pids = family
    time.sleep(2 * lifeline._INTERVAL_S)
    assert all(map(is_running, pids))


HOARDER = """
import multiprocessing, sys, time

def rank():
    from workers.vllm.start import lifeline
    lifeline._INTERVAL_S, lifeline._CHECKS = 0.01, 1
    blocks = [b"x" * 2**20 for _ in range(200)]
    last = blocks.pop()  # above the others: the heap cannot just shrink
    blocks.clear()
    resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
    held = resident()
    lifeline.hold()
    while resident() > held - 150 * 2**20:
        time.sleep(0.01)

if __name__ == "__main__":
    from workers.vllm.start import lifeline
    lifeline.offer()
    process = multiprocessing.get_context("spawn").Process(target=rank)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_glibc_is_told_to_keep_is_given_back(tmp_path: Path) -> None:
    script = tmp_path / "hoarder.py"
    script.write_text(HOARDER)
    kept = dict.fromkeys((lifeline.MMAP_THRESHOLD, "MALLOC_TRIM_THRESHOLD_"), str(2**32))
    own = {**os.environ, "PYTHONPATH": str(ROOT), **kept}
    assert subprocess.run([sys.executable, script], env=own, timeout=300).returncode == 0


def test_a_process_that_no_worker_started_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lifeline.VARIABLE, "1")
    assert multiprocessing.parent_process() is None
    lifeline.hold()
    assert not any(thread.name == "lifeline" for thread in threading.enumerate())
