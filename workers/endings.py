"""How processes end that have loaded vLLM: the interpreter itself would look through all of it
for garbage first.
"""

import atexit
import multiprocessing
import os
import sys
from multiprocessing import util


def end_process() -> None:
    """Does what is to be done at a process's end, and ends it with status 0."""
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def end_like_this() -> None:
    """Has this process, one of multiprocessing's, end so when it has done its work; one that
    fails ends as before.
    """
    if multiprocessing.parent_process() is not None:
        util.Finalize(
            None, _end_unless_failed, exitpriority=-1
        )  # after all others, which have none or more


def _end_unless_failed() -> None:
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        end_process()
