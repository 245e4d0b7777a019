"""Memory as the cgroup of this process counts it: version 2, else version 1, else the whole
machine's."""

from pathlib import Path

import psutil

# Version 1 says "no limit" with a number near 2^63.
_NO_LIMIT = 1 << 60
_ROOT = Path("/sys/fs/cgroup")
_V2 = ("memory.current", "memory.max", "inactive_file")
_V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")


def working_memory(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """(used, limit) in bytes. Used is without files that the kernel can drop, as the weights that
    were read: it is what counts before the kernel kills. Without a limit, the limit is the
    machine's memory. OSError, ValueError: unknown."""
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


def _folders(root: Path, own: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Where it may be counted. In a container its own folder is the root that it sees."""
    found = []
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        inside = path.lstrip("/")
        if not controllers:
            found += [(root / inside, _V2), (root, _V2)]
        elif "memory" in controllers.split(","):
            found += [(root / "memory" / inside, _V1), (root / "memory", _V1)]
    return sorted(found, key=lambda one: one[1] is _V1)
