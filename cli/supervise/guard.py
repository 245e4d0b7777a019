"""Runs a command so that neither the command nor its descendants outlive the supervisor.

The guard runs as a file, `python -I -S guard.py [options] -- command...`, and imports only the
standard library, so it starts in milliseconds. `cli.supervise.processes` starts one guard per
child, with three pipes:

* stdin: held open by the supervisor, never written. End of file means that the supervisor has
  ended, even by SIGKILL. (PR_SET_PDEATHSIG would also react to the end of the thread that started
  the child.)
* stdout: shared with the command, for its log.
* --report-fd: gets one line, the command's pid, or "error: ..." if it could not be started.

On SIGTERM the guard stops the command, and after --grace-s kills all remaining processes. On a
second SIGTERM it kills them at once. When the command ends, remaining descendants are killed too,
because they would hold GPU memory that the next start needs. The exit code is the command's, or
128 + the signal that ended it.
"""

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
# Limit for killed descendants to end. A process stuck in the kernel must not block the others.
KILL_WAIT_S = 5.0
ON_LINUX = sys.platform == "linux"


def prctl(option: int, argument: int) -> None:
    if ON_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def start(command: list[str], report_fd: int) -> int:
    """Starts `command` in a new process group, and reports its pid. Exits with 127 on failure."""
    guard_pid = os.getpid()
    failed_read, failed_write = os.pipe()  # close-on-exec: end of file means that exec worked
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            # For the case that the guard itself is killed. The setting applies to the calling
            # process, so it follows the fork. A parent that has ended already sends no signal.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard_pid:
                os._exit(1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], command)
        except BaseException as error:
            os.write(failed_write, str(error).encode())
        os._exit(127)
    os.close(failed_write)
    failure = os.read(failed_read, 4096).decode(errors="replace")
    os.write(report_fd, f"error: {failure}\n".encode() if failure else f"{pid}\n".encode())
    os.close(report_fd)
    if failure:
        sys.exit(127)
    return pid


def descendants(root: int) -> list[int]:
    """Returns the pids of all descendants of `root`, including orphans that the guard adopted."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                # The command name in parentheses may contain spaces and parentheses.
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the process has ended meanwhile
        children.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def reap() -> dict[int, int]:
    """Reaps all ended children. Returns {pid: exit code}; 128 + N means killed by signal N."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def kill_all(group: int) -> dict[int, int]:
    """Kills the group and all descendants. Returns {pid: exit code}, after KILL_WAIT_S at most."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        # Repeated, because a process may fork between the search and the signal.
        alive = descendants(os.getpid()) if ON_LINUX else []
        for pid in alive:
            send(pid, signal.SIGKILL)
        ended |= reap()
        if not alive:
            break
        time.sleep(0.01)
    return ended


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def watch(
    pid: int, grace_s: float, orphan_grace_s: float, wake_fd: int, caught: list[int]
) -> tuple[int, bool]:
    """Waits until the command has ended, and stops it if a signal arrives or the supervisor ends.

    `caught`: signals received so far; `wake_fd` becomes readable when one arrives.
    `orphan_grace_s`: replaces `grace_s` if the supervisor has ended. Returns the exit code, and
    whether the supervisor has ended.
    """
    kill_at: float | None = None
    orphaned = False
    while True:
        timeout = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select([wake_fd] if orphaned else [wake_fd, 0], [], [], timeout)
        if wake_fd in ready:
            os.read(wake_fd, 4096)
        stops = len(caught)
        caught.clear()
        if 0 in ready and not orphaned and not os.read(0, 4096):
            orphaned = True
            send(pid, signal.SIGTERM)
            kill_at = min(kill_at or float("inf"), time.monotonic() + orphan_grace_s)
        if stops and kill_at is None:
            send(pid, signal.SIGTERM)
            kill_at = time.monotonic() + grace_s
        elif stops:
            kill_at = time.monotonic()
        ended = reap()
        if pid not in ended and kill_at is not None and time.monotonic() >= kill_at:
            ended |= kill_all(pid)
            ended.setdefault(pid, 128 + signal.SIGKILL)
        if pid in ended:
            kill_all(pid)
            return ended[pid], orphaned


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--orphan-grace-s", type=float, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--remove-when-orphaned", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command

    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: caught.append(number))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1)

    os.set_inheritable(options.report_fd, False)
    pid = start(command, options.report_fd)
    code, orphaned = watch(pid, options.grace_s, options.orphan_grace_s, wake_read, caught)
    if orphaned and options.remove_when_orphaned:
        shutil.rmtree(options.remove_when_orphaned, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
