"""Memory in use and its limit, of this process's cgroup (version 2 or 1) or the whole machine."""

from pathlib import Path

import psutil

# Version 1 says "no limit" with a number near 2^63.
_NO_LIMIT = 1 << 60
_ROOT = Path("/sys/fs/cgroup")
_V2 = ("memory.current", "memory.max", "inactive_file")
_V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")


def working_memory(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """(used, limit) in bytes, as the kernel counts before it kills. OSError, ValueError: unknown.

    Used leaves out files that the kernel can drop, such as weights that were read. Without a limit,
    the limit is the machine's memory.
    """
    memory = psutil.virtual_memory()
    for folder, names in _folders(root, own):
        usage, limit, droppable = names
        if not (folder / usage).exists():
            continue
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / usage).read_text()) - int(stat.get(droppable, 0))
        text = (folder / limit).read_text().strip()
        most = _NO_LIMIT if text == "max" else int(text)
        return max(0, used), min(most, int(memory.total))
    return int(memory.total - memory.available), int(memory.total)


def memory_left() -> tuple[int, int]:
    """(left, limit) in bytes: what this process and its like may still take, of the container's
    memory and of the machine's. OSError, ValueError: unknown.
    """
    used, limit = working_memory()
    return max(0, min(limit - used, int(psutil.virtual_memory().available))), limit


def _folders(root: Path, own: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Folders that may hold the counts; in a container the process's own is the root it sees."""
    found = []
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        inside = path.lstrip("/")
        if not controllers:
            found += [(root / inside, _V2), (root, _V2)]
        elif "memory" in controllers.split(","):
            found += [(root / "memory" / inside, _V1), (root / "memory", _V1)]
    return sorted(found, key=lambda one: one[1] is _V1)
