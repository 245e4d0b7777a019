"""Signs of life for a container's health check: a process updates a folder's mtime."""

import contextlib
import os
from pathlib import Path


def show(folder: Path) -> None:
    """Updates the folder's mtime, and creates the folder if it is missing. Does nothing if the disk
    is full or another user owns the path. Follows no symbolic link.
    """
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.utime(opened)
        finally:
            os.close(opened)


def remove(folder: Path) -> None:
    """Removes the folder if it exists."""
    with contextlib.suppress(OSError):
        folder.rmdir()
