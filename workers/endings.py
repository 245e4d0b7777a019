"""Ends processes that have loaded vLLM, without the interpreter's long garbage collection."""

import atexit
import multiprocessing
import os
import sys
from multiprocessing import util


def end_process() -> None:
    """Runs the exit handlers and ends this process with status 0."""
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_like_this() -> None:
    """In a child process of multiprocessing, calls `end_process` when the work has succeeded."""
    if multiprocessing.parent_process() is not None:
        # The lowest priority: after all other finalizers.
        util.Finalize(None, _end_unless_failed, exitpriority=-1)


def _end_unless_failed() -> None:
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        end_process()
