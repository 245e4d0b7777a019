"""Quick ends of processes that loaded vLLM: the interpreter would collect its garbage first."""

import atexit
import multiprocessing
import os
import sys
from multiprocessing import util


def end_process() -> None:
    """Runs the exit handlers and ends the process with status 0."""
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_like_this() -> None:
    """Ends this multiprocessing process like that after its work; a failing one ends as before."""
    if multiprocessing.parent_process() is not None:
        # The lowest priority: after all others.
        util.Finalize(None, _end_unless_failed, exitpriority=-1)


def _end_unless_failed() -> None:
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        end_process()
