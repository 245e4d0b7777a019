"""Reads the used memory and the memory limit of this process's cgroup, or of the machine."""

from pathlib import Path
from typing import NamedTuple

import psutil

# Version 1 reports a number near 2^63 if there is no limit.
_NO_LIMIT = 1 << 60
_ROOT = Path("/sys/fs/cgroup")
_V2 = ("memory.current", "memory.max", "inactive_file")
_V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")


class Memory(NamedTuple):
    used: int
    droppable: int  # the part of `used` that the kernel can drop: cached files, such as weights
    limit: int | None  # None if there is no limit


def container_memory(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> Memory:
    """Returns the memory of this process's cgroup; without a cgroup, of the machine.

    `root`: the cgroup file system. `own`: the file that lists the process's cgroups. Raises OSError
    or ValueError.
    """
    for folder, (usage, limit, droppable) in _folders(root, own):
        if not (folder / usage).exists():
            continue
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        text = (folder / limit).read_text().strip()
        most = None if text == "max" or int(text) >= _NO_LIMIT else int(text)
        return Memory(int((folder / usage).read_text()), int(stat.get(droppable, 0)), most)
    memory = psutil.virtual_memory()
    return Memory(int(memory.total - memory.available), 0, None)


def working_memory(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """Returns (used, limit) in bytes. When `used` reaches `limit`, the kernel kills a process.

    `used` excludes memory that the kernel can drop. Raises OSError or ValueError if the memory
    counters cannot be read.
    """
    found, total = container_memory(root, own), int(psutil.virtual_memory().total)
    return max(0, found.used - found.droppable), min(found.limit or total, total)


def memory_left() -> tuple[int, int]:
    """Returns this process's (memory left, memory limit) in bytes. Raises OSError or ValueError if
    the memory counters cannot be read.
    """
    used, limit = working_memory()
    return max(0, min(limit - used, int(psutil.virtual_memory().available))), limit


def _folders(root: Path, own: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Returns folders that may hold this process's memory counters, with the counters' file names.

    On a host, a process's cgroup is a folder below `root`; in a container, it is `root` itself.
    """
    found = []
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        inside = path.lstrip("/")
        if not controllers:
            found += [(root / inside, _V2), (root, _V2)]
        elif "memory" in controllers.split(","):
            found += [(root / "memory" / inside, _V1), (root / "memory", _V1)]
    return sorted(found, key=lambda one: one[1] is _V1)
