"""Ends vLLM's processes with the worker that started them, because orphans would keep GPU memory.

vLLM's workers end with the engine core. But the core ends only on request of the process that
started it, and a killed process makes no request.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import psutil

# The worker's pid, for the processes that vLLM starts from the worker. Not for Ray's processes,
# which may be on other hosts.
VARIABLE = "PROOFLINE_WORKER_PID"

# Seconds between two checks.
_INTERVAL_S = 1.0


def offer() -> None:
    """Sets this process as the worker. Must be called before vLLM starts processes."""
    os.environ[VARIABLE] = str(os.getpid())


def hold() -> None:
    """Starts a thread that ends this vLLM worker and its engine core when the process that called
    `offer` ends.
    """
    main = int(os.environ.get(VARIABLE, "0"))
    parent = multiprocessing.parent_process()
    if not main or parent is None or parent.pid is None:
        return
    core = os.getpid() if parent.pid == main else parent.pid
    threading.Thread(target=_watch, args=(main, core), name="lifeline", daemon=True).start()


def _watch(main: int, core: int) -> None:
    # Compares parents instead of testing pids, because pids may be reused.
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
