"""A folder for the sockets of vLLM's processes, one per process, because vLLM removes no socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"  # vLLM's own; the system's folder of temporary files unless set
PREFIX = "proofline-sockets-"
# Bytes of a socket's path on Linux, with the zero at its end, and of the name that vLLM adds.
_MOST = 108
_NAME = len("/01234567-89ab-cdef-0123-456789abcdef") + 1


class Sockets:
    """A folder for vLLM's sockets from here to `remove`. What dead processes left goes first.

    The folder's lock, and not its pid, says whether a process lives: containers may share folders.
    A VLLM_RPC_BASE_PATH of the operator's stays as it is.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        if os.environ.get(VARIABLE):
            return
        _remove_dead()
        made = Path(tempfile.mkdtemp(prefix="proofline-"))
        self._lock = _locked(made)
        # Named only now: without a lock it would be taken for a dead process's.
        folder = made.rename(made.with_name(PREFIX + made.name.removeprefix("proofline-")))
        self._folder = folder
        if len(os.fsencode(folder)) + _NAME <= _MOST:
            os.environ[VARIABLE] = str(folder)
        else:
            self.remove()

    def remove(self) -> None:
        """Removes the folder; to be called when the engine's processes are gone. Repeatable."""
        if self._folder is None:
            return
        if os.environ.get(VARIABLE) == str(self._folder):
            del os.environ[VARIABLE]
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._folder = None


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None: another process has it, or may."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone, or another user's
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
