"""`proofline up` in a terminal of its own, and other commands beside it, as a user has them."""

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import psutil

from cli.supervise.processes import command_of_proofline, environment_of_proofline
from tests.harness.commands import shown
from tests.integration.processes import descendants
from tests.stacks.round_client import LOG_LINES

START_TIMEOUT_S = 600.0  # below that of a test
STOP_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 250.0
# Each process of `make test` has logs of its own: two stacks' workers have the same names.
STATE_HOME = (
    Path(__file__).resolve().parents[2]
    / "build"
    / "state"
    / os.environ.get("PYTEST_XDIST_WORKER", "")
)
# Seconds that proofs wait for constant chat before they get a share, on the shared `up`.
PATIENCE_S = 6


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """A user's environment: nothing set for us or for vLLM, but for `more`; logs in build/."""
    ours = ("POC_", "PROOFLINE_", "VLLM_CPU_", "OMP_")
    found = environment_of_proofline({})
    kept = {name: value for name, value in found.items() if not name.startswith(ours)}
    return {**kept, "XDG_STATE_HOME": str(STATE_HOME), **(more or {})}


def proofline(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; what it said to people is shown where a test fails."""
    done = subprocess.run(
        command_of_proofline(*map(str, arguments)),
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        env=environment(),
    )
    print(done.stderr)
    return done


class Up:
    """`proofline up`, ready when it is made."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self._process = subprocess.Popen(
            command_of_proofline("up", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(env),
            # its own process group, as in a terminal: Ctrl-C is for it alone
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._show = shown()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.base_url = self.wait_line(r"up: ready at (http://\S+)", START_TIMEOUT_S)[1]
            self.start = list(self.log)  # what was said until then
        except BaseException:
            self.end()
            raise

    @property
    def below(self) -> list[psutil.Process]:
        return descendants(self._process.pid)

    def terminate(self) -> int:
        """The exit code after a SIGTERM to the command alone, as a supervisor sends it."""
        self._process.terminate()
        return self._process.wait(STOP_TIMEOUT_S)

    def ctrl_c(self) -> int:
        """The exit code after Ctrl-C."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        return self._process.wait(STOP_TIMEOUT_S)

    def end(self) -> None:
        if self._process.poll() is None:
            self.ctrl_c()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._show(line.rstrip("\n"))
                self.log.append(line.rstrip())
                self._lines.put(line)
        self._lines.put(None)

    def wait_line(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """Waits for the next line of output that matches."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not within {timeout_s:g} s: {pattern}") from None
            assert line is not None, f"up ended before {pattern}"
            if found := re.search(pattern, line):
                return found
