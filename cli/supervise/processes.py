"""Child processes that are restarted after crashes, and that end when the supervisor ends.

Each child runs under a guard process (`guard.py`), which ends the child even after the supervisor
was killed by SIGKILL.
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
USAGE_EXIT_CODE = 2  # wrong arguments: a child with this exit code is not restarted
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
STEADY_S = 60.0  # after this time of readiness a crash begins again with the shortest backoff
TAIL_LINES = 400  # last lines of a child's log that are kept
MOST_SAID_CHARS = 500  # most characters of a failed start's error text
_MOST_REMEMBERED = 1000  # restart times that are kept
GUARD_MARGIN_S = 8.0  # the guard's time to kill and reap, after the child's grace period

LineSink = Callable[[str, str], None]
"""Takes (child's name, a line of the child's log without newline). Must be thread-safe."""


@dataclass(frozen=True)
class ChildSpec:
    """A child's command, environment, and limits for stops and restarts."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    grace_s: float = 20.0  # seconds from SIGTERM to SIGKILL
    orphan_grace_s: float = 3.0  # the same after the supervisor's death
    # Crashes in a row, before or within STEADY_S after readiness; the next gives the child up.
    max_fast_crashes: int = 5
    max_failed_starts: int | None = None  # limit before the first readiness; None: max_fast_crashes
    # The log line that reports readiness; None if the child is ready at once.
    ready_line: re.Pattern[str] | None = None
    # Log lines that explain a failed start.
    telling: re.Pattern[str] | None = None
    # Returns why a failed start must fail again, according to its log; None if it may succeed.
    hopeless: Callable[[Sequence[str]], str | None] = lambda log: None
    inherited_fds: tuple[int, ...] = ()
    remove_when_orphaned: Path | None = None  # a temporary directory


class Child:
    """A process that is restarted after crashes, with growing delays. Can be started only once."""

    def __init__(self, spec: ChildSpec, on_line: LineSink, announce: Callable[[str], None]) -> None:
        """`announce`: gets a sentence about each crash, each restart, and the end of restarts."""
        self.spec = spec
        self.pid: int | None = None  # of the command, not of its guard; None if it does not run
        self.was_ready = False  # in any run
        self.gave_up: str | None = None  # why the child is no longer restarted
        self.crashes = 0
        self.restarts = 0
        self.since = time.time()  # when it got ready; if not ready, last readiness or first start
        self.last_exit: str | None = None  # description of the last exit
        self.last_exit_at: float | None = None
        self._restarted_at: deque[float] = deque(maxlen=_MOST_REMEMBERED)
        self._on_line = on_line
        self._announce = announce
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._said: deque[str] = deque(maxlen=TAIL_LINES)  # lines of this run
        # Held while a guard is started or signalled. Reentrant for signal handlers.
        self._lock = threading.RLock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._ready_at: float | None = None  # in this run
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._supervise, name=f"supervise-{spec.name}", daemon=True
        )

    @property
    def is_ready(self) -> bool:
        return self.pid is not None and self._ready_at is not None

    @property
    def tail(self) -> list[str]:
        """The last lines of the child's log, including those of earlier runs."""
        return list(self._tail)

    def restarts_within(self, seconds: float) -> int:
        """Returns the number of restarts in the last `seconds`, at most _MOST_REMEMBERED."""
        since = time.time() - seconds
        return sum(at >= since for at in list(self._restarted_at))

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        """Sends SIGTERM. SIGKILL follows after the grace period, or if this is called again."""
        self._stop.set()
        with self._lock:
            if self._guard is not None:
                self._guard.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.request_stop()  # SIGTERM
        self.request_stop()  # SIGKILL

    def wait_stopped(self) -> None:
        """Waits until all processes of the child have ended. Kills a guard that hangs."""
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
                self.crashes += 1
                self.last_exit, self.last_exit_at = describe_exit(code), time.time()
                if self._ready_at is not None:
                    self.since = self.last_exit_at
                was_steady = (
                    self._ready_at is not None and time.monotonic() - self._ready_at >= STEADY_S
                )
                fast_crashes = 1 if was_steady else fast_crashes + 1
                ended = f"{self.spec.name} ended ({self.last_exit})"
                why = "its arguments are wrong" if code == USAGE_EXIT_CODE else None
                if why is None and not self.was_ready:
                    why = self.spec.hopeless(self.tail)
                most = self.spec.max_failed_starts
                if most is None or self.was_ready:
                    most = self.spec.max_fast_crashes
                if why is None and fast_crashes > most:
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
        except Exception as error:  # a bug: the child is no longer supervised
            self.gave_up = f"{self.spec.name} is not supervised any more: {error!r}"
            self._announce(self.gave_up)
        finally:
            self._ended.set()

    def _last_words(self, code: int) -> str:
        """Returns ": " and the last error line of a run that never got ready; "" without one."""
        if self._ready_at is not None:
            return ""
        # A copy, because a late reader of this run's log may still append lines.
        telling, said = self.spec.telling, list(self._said)
        matches = [telling.search(line) for line in said] if telling is not None else []
        found = [match.string[match.start() :] for match in matches if match is not None]
        if not found and 0 < code < 128:
            found = said
        return f": {found[-1].strip()[:MOST_SAID_CHARS]}" if found else ""

    def _pause(self, seconds: float) -> bool:
        return self._stop.wait(seconds)

    def _note_ready(self) -> None:
        took_s = time.time() - self.since
        if self.restarts and self.spec.ready_line is not None:
            told = "is ready again" if self.was_ready else "is ready"
            self._announce(f"{self.spec.name} {told}, after {took_s:.1f} s")
        self.since = time.time()
        self.was_ready, self._ready_at = True, time.monotonic()

    def _run_once(self) -> int | None:
        """Runs the command once. Returns its exit code; None if a stop was requested earlier."""
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
                    # Ctrl-C must reach only the supervisor, which stops its children in order.
                    start_new_session=True,
                )
            except OSError as error:  # for example too little memory; another try may succeed
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
        self.pid = pid
        if pid is not None and self.spec.ready_line is None:
            self._note_ready()
        reader = threading.Thread(target=self._read_log, args=(guard,), daemon=True)
        reader.start()
        code = guard.wait()
        with self._lock:
            self.pid = None
            self._guard = None
        # The guard itself was killed, so it did not end the child's group.
        if code < 0 and pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        reader.join(timeout=2)
        if guard.stdin is not None:
            guard.stdin.close()
        return code

    def _guard_command(self, report_fd: int) -> list[str]:
        spec = self.spec
        flags = [f"--grace-s={spec.grace_s}", f"--orphan-grace-s={spec.orphan_grace_s}"]
        if spec.remove_when_orphaned is not None:
            flags.append(f"--remove-when-orphaned={spec.remove_when_orphaned}")
        guard = [sys.executable, "-I", "-S", str(GUARD), f"--report-fd={report_fd}", *flags]
        return [*guard, "--", *spec.command]

    def _read_log(self, guard: subprocess.Popen[bytes]) -> None:
        assert guard.stdout is not None
        with guard.stdout as stream:
            for line in stream:
                # A progress bar redraws itself with carriage returns; only its last state is kept.
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
    """Describes an exit code in words. A code above 128 or below 0 means killed by a signal."""
    number = -code if code < 0 else code - 128
    if number > 0:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            pass
    return f"exit code {code}"


def command_of_proofline(*arguments: str) -> list[str]:
    """Returns the command line of `proofline ARGUMENTS...` with this Python."""
    # -P: a folder `api` or `workers` in the working directory must not shadow our packages.
    program = "from cli.main import app; app(prog_name='proofline')"
    return [sys.executable, "-P", "-c", program, *arguments]


def environment_of_proofline(
    overrides: Mapping[str, str], without: Collection[str] = ()
) -> dict[str, str]:
    """Returns a child's environment: this process's variables, except `without`, and `overrides`.

    Extends PYTHONPATH so that the child can import Proofline's packages.
    """
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [path for path in inherited.split(os.pathsep) if path]
    # A checkout must be on PYTHONPATH; an installed package is on the path in any case.
    if Path(root).name not in ("site-packages", "dist-packages") and root not in paths:
        paths.insert(0, root)
    # Python buffers pipes in blocks, which would delay logs by kilobytes.
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **overrides}
