"""Processes that end without a last garbage collection of all that they loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Run with what is to happen to the process it starts, or "itself". The interpreter's own end would
# collect what is in a cycle.
PROGRAM = """
import atexit, multiprocessing, sys
from workers.endings import end_like_this, end_process

class Loaded:
    def __del__(self):
        print("looked through")

def work(fate):
    loaded = Loaded()
    loaded.itself = loaded
    atexit.register(print, "cleaned up")
    end_like_this()
    if fate == "raises":
        raise ValueError
    if fate.startswith("exits with"):
        sys.exit(int(fate.split()[-1]))

if __name__ == "__main__":
    if sys.argv[1] == "itself":
        work("")
        end_process()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1],))
    process.start()
    process.join()
    print(process.exitcode)
"""


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        ("itself", ["cleaned up"]),
        ("returns", ["cleaned up", "0"]),
        ("exits with 0", ["cleaned up", "0"]),
        ("exits with 3", ["cleaned up", "looked through", "3"]),
        ("raises", ["cleaned up", "looked through", "1"]),
    ],
)
def test_one_that_has_done_its_work_is_not_looked_through_and_one_that_failed_ends_as_ever(
    tmp_path: Path, fate: str, said: list[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), fate]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout.split("\n")[:-1], done.returncode) == (said, 0), done.stderr
