"""Signs of life for a container's health check: the mtime of a private folder."""

import contextlib
import os
from pathlib import Path


def show(folder: Path) -> None:
    """Updates the folder's mtime. Does nothing if the disk is full or another user owns the path,
    perhaps as a link to one of our files."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.utime(opened)
        finally:
            os.close(opened)


def remove(folder: Path) -> None:
    """Removes the folder, if there is one."""
    with contextlib.suppress(OSError):
        folder.rmdir()
