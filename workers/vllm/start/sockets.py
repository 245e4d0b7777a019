"""Gives each worker a folder for vLLM's sockets, because vLLM itself never removes sockets."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"  # vLLM's variable; the default is the system's temporary folder
PREFIX = "proofline-sockets-"
# Limit of a socket path on Linux in bytes, with its final zero, and the length of vLLM's file name.
_MOST = 108
_NAME = len("/01234567-89ab-cdef-0123-456789abcdef") + 1


class Sockets:
    """A folder for vLLM's sockets until `remove`, unless the operator has set VLLM_RPC_BASE_PATH.
    Also removes the folders of dead processes. A lock marks the folder of a living process, because
    ids are ambiguous if containers share the temporary folder.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        if os.environ.get(VARIABLE):
            return
        _remove_dead()
        made = Path(tempfile.mkdtemp(prefix="proofline-"))
        self._lock = _locked(made)
        # Renamed after locking: without a lock it would count as a dead process's folder.
        folder = made.rename(made.with_name(PREFIX + made.name.removeprefix("proofline-")))
        self._folder = folder
        if len(os.fsencode(folder)) + _NAME <= _MOST:
            os.environ[VARIABLE] = str(folder)
        else:
            self.remove()

    def remove(self) -> None:
        """Removes the folder, after the engine's processes have ended. May be repeated."""
        if self._folder is None:
            return
        if os.environ.get(VARIABLE) == str(self._folder):
            del os.environ[VARIABLE]
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._folder = None


def _locked(folder: Path) -> int | None:
    """Locks the folder and returns its file descriptor; None if it is locked or not accessible."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # the folder is gone or belongs to another user
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_dead() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.close(lock)
