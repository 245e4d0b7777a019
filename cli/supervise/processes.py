"""Child processes that are restarted when they crash and never outlive the supervisor.

Each child runs under its own guard (`guard.py` beside this file), so that nothing is left running
even when the supervisor is killed with SIGKILL.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
USAGE_EXIT_CODE = 2  # wrong arguments stay wrong: a child that ends with it is not started again
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
STEADY_S = 60.0  # after so long a life a crash starts over with the shortest backoff
TAIL_LINES = 400  # of a child's log, kept for error messages
MOST_SAID_CHARS = 500  # of the last sentence of a start that failed
_MOST_REMEMBERED = 1000  # times of restarts
GUARD_MARGIN_S = 8.0  # the guard's own time to kill and reap, beyond the child's grace period

LineSink = Callable[[str, str], None]
"""Takes (child's name, one line of its log without the newline); called from several threads."""


@dataclass(frozen=True)
class ChildSpec:
    """A child's command, its environment and the limits of patience with it."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    grace_s: float = 20.0  # from SIGTERM to SIGKILL when asked to stop
    orphan_grace_s: float = 3.0  # the same after the supervisor's death, when nobody waits
    # in a row, each within STEADY_S of its start's end; then it is given up
    max_fast_crashes: int = 5
    max_failed_starts: int | None = None  # of one that never got ready; None: max_fast_crashes
    # the log's line that ends the start; None: it starts at once
    ready_line: re.Pattern[str] | None = None
    # lines of the log that say why a start failed
    telling: re.Pattern[str] | None = None
    # why the log of a failed start leaves no hope
    hopeless: Callable[[Sequence[str]], str | None] = lambda log: None
    inherited_fds: tuple[int, ...] = ()
    remove_when_orphaned: Path | None = None  # a temporary directory that nobody else would remove


class Child:
    """One supervised process: started once, restarted with backoff, stopped."""

    def __init__(self, spec: ChildSpec, on_line: LineSink, announce: Callable[[str], None]) -> None:
        """`announce` takes one sentence for the user: crashes, restarts, giving up."""
        self.spec = spec
        self.gave_up: str | None = None  # why, once the child is not restarted any more
        self.crashes = 0
        self.restarts = 0
        self.since = time.time()  # when it got ready, or else was started first or was ready last
        self.last_exit: str | None = None  # in words
        self.last_exit_at: float | None = None
        self._restarted_at: deque[float] = deque(maxlen=_MOST_REMEMBERED)
        self._on_line = on_line
        self._announce = announce
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._said: deque[str] = deque(maxlen=TAIL_LINES)  # in this run
        # Held from a guard's start to its signal. Reentrant: a signal handler may ask to stop then.
        self._lock = threading.RLock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._was_ready = False  # in any run
        self._ready_at: float | None = None  # in this run
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._supervise, name=f"supervise-{spec.name}", daemon=True
        )

    @property
    def pid(self) -> int | None:
        """The command's own pid while it runs (not its guard's)."""
        return self._pid

    @property
    def was_ready(self) -> bool:
        """True if its start has ended once, in any run."""
        return self._was_ready

    @property
    def is_ready(self) -> bool:
        return self._pid is not None and self._ready_at is not None

    @property
    def tail(self) -> list[str]:
        """The last lines of the log, over restarts."""
        return list(self._tail)

    def restarts_within(self, seconds: float) -> int:
        """How often it was restarted in the last `seconds`, which must be below some hours."""
        since = time.time() - seconds
        return sum(at >= since for at in list(self._restarted_at))

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        """SIGTERM now, SIGKILL after the grace period or when called again. Does not wait."""
        self._stop.set()
        with self._lock:
            if self._guard is not None:
                self._guard.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL now. Does not wait."""
        self.request_stop()  # the first ends it orderly,
        self.request_stop()  # the second at once

    def wait_stopped(self) -> None:
        """Waits until nothing of the child is left, little longer than its grace period."""
        if self._thread.ident is None:
            return
        if not self._ended.wait(self.spec.grace_s + GUARD_MARGIN_S):
            with self._lock:
                if self._guard is not None:
                    self._guard.kill()
            self._ended.wait(GUARD_MARGIN_S)

    def stop(self) -> None:
        self.request_stop()
        self.wait_stopped()

    def _supervise(self) -> None:
        fast_crashes = 0
        try:
            while not self._stop.is_set():
                self._ready_at = None
                self._said.clear()
                code = self._run_once()
                if code is None or self._stop.is_set():
                    return
                self._note_end(code)
                was_steady = (
                    self._ready_at is not None and time.monotonic() - self._ready_at >= STEADY_S
                )
                fast_crashes = 1 if was_steady else fast_crashes + 1
                ended = f"{self.spec.name} ended ({self.last_exit})"
                why = "its arguments are wrong" if code == USAGE_EXIT_CODE else None
                if why is None and not self._was_ready:
                    why = self.spec.hopeless(self.tail)
                if why is None and fast_crashes > self._most_crashes:
                    why = f"{fast_crashes} times in a row"
                if why is not None:
                    self.gave_up = f"{ended}; not restarted: {why}"
                    self._announce(self.gave_up)
                    return
                delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (fast_crashes - 1))
                said = self._last_words(code)
                self._announce(f"{ended}; restarting it in {delay_s:g} s{said}")
                self._pause(delay_s)
                self.restarts += 1
                self._restarted_at.append(time.time())
        except Exception as error:  # of our own: nobody would look after the child any more
            self.gave_up = f"{self.spec.name} is not supervised any more: {error!r}"
            self._announce(self.gave_up)
        finally:
            self._ended.set()

    def _last_words(self, code: int) -> str:
        """The last sentence of a run that ended before it was ready, with a colon before it."""
        if self._ready_at is not None:
            return ""
        telling = self.spec.telling
        matches = [telling.search(line) for line in self._said] if telling is not None else []
        found = [match.string[match.start() :] for match in matches if match is not None]
        if not found and 0 < code < 128:
            found = list(self._said)
        return f": {found[-1].strip()[:MOST_SAID_CHARS]}" if found else ""

    def _pause(self, seconds: float) -> bool:
        """Waits before a restart; whether the child is to stop instead."""
        return self._stop.wait(seconds)

    def _note_end(self, code: int) -> None:
        self.crashes += 1
        self.last_exit, self.last_exit_at = describe_exit(code), time.time()
        if self._ready_at is not None:
            self.since = self.last_exit_at

    def _note_ready(self) -> None:
        """This run is ready; after a restart that takes a while a line says so."""
        took_s = time.time() - self.since
        if self.restarts and self.spec.ready_line is not None:
            told = "is ready again" if self._was_ready else "is ready"
            self._announce(f"{self.spec.name} {told}, after {took_s:.1f} s")
        self.since = time.time()
        self._was_ready, self._ready_at = True, time.monotonic()

    @property
    def _most_crashes(self) -> int:
        starts = self.spec.max_failed_starts
        return self.spec.max_fast_crashes if starts is None or self._was_ready else starts

    def _run_once(self) -> int | None:
        """Runs the command to its end; its exit code, or None when stopped before the start."""
        report_read, report_write = os.pipe()
        with self._lock:
            if self._stop.is_set():
                os.close(report_read)
                os.close(report_write)
                return None
            try:
                guard = self._guard = subprocess.Popen(
                    self._guard_command(report_write),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=dict(self.spec.env),
                    pass_fds=(report_write, *self.spec.inherited_fds),
                    # The terminal's Ctrl-C is the supervisor's, which stops its children in order.
                    start_new_session=True,
                )
            except OSError as error:  # too little memory, say: another try may have more luck
                os.close(report_read)
                os.close(report_write)
                self._take_line(f"the guard of {self.spec.name} could not be started: {error}")
                return 1
        os.close(report_write)
        with os.fdopen(report_read, encoding="utf-8", errors="replace") as report:
            started = report.readline().strip()
        pid = int(started) if started.isdigit() else None
        if pid is None:
            self._take_line(
                f"{self.spec.command[0]} could not be started: {started.removeprefix('error: ')}"
            )
        self._pid = pid
        if pid is not None and self.spec.ready_line is None:
            self._note_ready()
        reader = threading.Thread(target=self._read_log, args=(guard,), daemon=True)
        reader.start()
        code = guard.wait()
        with self._lock:
            self._pid = None
            self._guard = None
        # the guard itself was killed: nobody has seen to the child's group
        if code < 0 and pid is not None:
            kill_group(pid)
        reader.join(timeout=2)
        if guard.stdin is not None:
            guard.stdin.close()
        return code

    def _guard_command(self, report_fd: int) -> list[str]:
        spec = self.spec
        options: dict[str, object] = {
            "grace-s": spec.grace_s,
            "orphan-grace-s": spec.orphan_grace_s,
            "report-fd": report_fd,
        }
        if spec.remove_when_orphaned is not None:
            options["remove-when-orphaned"] = spec.remove_when_orphaned
        flags = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-I", "-S", str(GUARD), *flags, "--", *spec.command]

    def _read_log(self, guard: subprocess.Popen[bytes]) -> None:
        assert guard.stdout is not None
        with guard.stdout as stream:
            for line in stream:
                # A progress bar redraws itself by carriage returns: its last state counts.
                text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                if text:
                    self._take_line(text)

    def _take_line(self, line: str) -> None:
        ready = self.spec.ready_line
        if ready is not None and self._ready_at is None and ready.search(line):
            self._note_ready()
        self._tail.append(line)
        self._said.append(line)
        self._on_line(self.spec.name, line)


def describe_exit(code: int) -> str:
    """An exit code in words; above 128, and below 0, it stands for a signal."""
    number = -code if code < 0 else code - 128
    if number > 0:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            pass
    return f"exit code {code}"


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def command_of_proofline(*arguments: str) -> list[str]:
    """`proofline ARGUMENTS...` run by this very interpreter, wherever the command is installed."""
    # -P: a folder `api` or `workers` in the working directory must not be imported for ours.
    return [
        sys.executable,
        "-P",
        "-c",
        "from cli.main import app; app(prog_name='proofline')",
        *arguments,
    ]


def environment_of_proofline(
    overrides: Mapping[str, str], without: Collection[str] = ()
) -> dict[str, str]:
    """This process's environment with `overrides`, `without` some, our packages importable."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [path for path in inherited.split(os.pathsep) if path]
    # A checkout is found through PYTHONPATH; an installed package is on the path anyway.
    if Path(root).name not in ("site-packages", "dist-packages") and root not in paths:
        paths.insert(0, root)
    # Python buffers a pipe by blocks: a log would lag behind by kilobytes.
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **overrides}
