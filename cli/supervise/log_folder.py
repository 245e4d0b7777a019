"""A folder with one log file of limited size for each process."""

import contextlib
import fcntl
import os
import threading
from functools import partial
from io import TextIOWrapper
from itertools import count
from logging.handlers import RotatingFileHandler
from pathlib import Path

# A larger file is renamed to NAME.log.1, and a new file begins.
MOST_BYTES = 10_000_000
_LOCK = "in-use"


def make_folder(path: Path) -> None:
    """Creates a folder that only its owner can read. An existing folder keeps its mode."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


class LogFolder:
    """A folder for one command's logs. The previous log of NAME.log is NAME.log.1. Thread-safe."""

    def __init__(self, parent: Path | None = None) -> None:
        """Creates the folder in `parent` (None: the user's state folder). Raises OSError."""
        parent = parent or _state_home()
        make_folder(parent)
        for number in count(1):
            self.path = parent / ("logs" if number == 1 else f"logs-{number}")
            make_folder(self.path)
            # Held until this process ends.
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(self._lock)
        self._files: dict[str, _LogFile] = {}
        self._lines = threading.Lock()

    def write(self, name: str, line: str) -> None:
        """Appends a line to a process's file. A line that cannot be written is lost."""
        with self._lines, contextlib.suppress(OSError):
            if name not in self._files:
                self._files[name] = _LogFile(self.fresh(name))
            self._files[name].write(line)

    @property
    def is_used(self) -> bool:
        return bool(self._files)

    def fresh(self, name: str) -> Path:
        """Creates an empty log file for a process, and renames an existing one to NAME.log.1."""
        _, slash, slot = name.rpartition("/")
        path = self.path / f"{'worker-' if slash else ''}{slot}.log"
        if path.exists():
            path.replace(path.with_name(f"{path.name}.1"))
        path.touch(mode=0o600)
        return path

    def close(self) -> None:
        """Closes all files, and unlocks the folder for other commands."""
        for file in self._files.values():
            file.close()
        os.close(self._lock)


class _LogFile(RotatingFileHandler):
    is_closed = False

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        # Others could read a new file of plain `open`.
        private = partial(os.open, mode=0o600)
        return open(self.baseFilename, "a", encoding=self.encoding, opener=private)

    def close(self) -> None:
        self.is_closed = True
        super().close()

    def write(self, line: str) -> None:
        """Appends a line unless the file is closed. Raises OSError if writing fails."""
        if self.is_closed:
            return
        if self.stream is None:  # it could not be opened again after a rename
            self.stream = self._open()
        if self.stream.tell() > MOST_BYTES:
            self.doRollover()
        self.stream.write(f"{line}\n")
        self.stream.flush()


def _state_home() -> Path:
    named = os.environ.get("XDG_STATE_HOME", "")
    home = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "state"
    return home / "proofline"
