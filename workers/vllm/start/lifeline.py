"""Ties vLLM's processes to the worker that started them: orphans would keep a GPU's memory.

vLLM's own workers end with its engine core, but the core ends only when the process that started it
says so, which one that was killed never does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import psutil

# The worker's pid, for processes that vLLM starts from it; not Ray's, maybe on another host.
VARIABLE = "PROOFLINE_WORKER_PID"

# Seconds between two looks.
_INTERVAL_S = 1.0


def offer() -> None:
    """Names this process as the worker, before vLLM starts any."""
    os.environ[VARIABLE] = str(os.getpid())


def hold() -> None:
    """Ends this vLLM worker and its engine core with the process that called `offer`."""
    main = int(os.environ.get(VARIABLE, "0"))
    parent = multiprocessing.parent_process()
    if not main or parent is None or parent.pid is None:
        return
    core = os.getpid() if parent.pid == main else parent.pid
    threading.Thread(target=_watch, args=(main, core), name="lifeline", daemon=True).start()


def _watch(main: int, core: int) -> None:
    # By parents, not by whether pids exist: a pid may be given anew, an orphan stays one.
    own_parent = os.getppid()
    while _parent_of(core) == main and os.getppid() == own_parent:
        time.sleep(_INTERVAL_S)
    if os.getppid() == core:
        os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return None
