"""Ends vLLM's processes when the worker that started them ends, because orphans would keep GPU
memory. vLLM's worker processes end with the engine core. But the engine core ends only at the
request of our worker, and a killed worker makes no request.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
import time

import psutil

# The worker's pid, for processes that vLLM starts on this host (Ray may use others).
VARIABLE = "PROOFLINE_WORKER_PID"

# If this variable is set (launch.py), glibc keeps free memory in the heap.
MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"

# Seconds between two checks. Checks between two returns of free memory; one takes 10 to 40 ms.
_INTERVAL_S = 1.0
_CHECKS = 60


def offer() -> None:
    """Ties vLLM's processes to this process, so that they end with it. Must precede their start."""
    os.environ[VARIABLE] = str(os.getpid())


def hold() -> None:
    """Starts a thread that kills this process and its engine core when our worker ends."""
    main = int(os.environ.get(VARIABLE, "0"))
    parent = multiprocessing.parent_process()
    if not main or parent is None or parent.pid is None:
        return
    core = os.getpid() if parent.pid == main else parent.pid
    threading.Thread(target=_watch, args=(main, core), name="lifeline", daemon=True).start()


def _watch(main: int, core: int) -> None:
    # Compares parents instead of testing pids, because pids may be reused.
    own_parent = os.getppid()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if MMAP_THRESHOLD in os.environ else None
    checks = 0
    while _parent_of(core) == main and os.getppid() == own_parent:
        time.sleep(_INTERVAL_S)
        checks += 1
        if trim is not None and checks % _CHECKS == 0:
            trim(ctypes.c_size_t(0))
    if os.getppid() == core:
        os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent_of(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        return None
