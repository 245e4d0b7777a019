"""Checks this machine's disk space and memory, and the API's port."""

from collections.abc import Iterator
from pathlib import Path

import httpx

from api.models.cache import free_bytes
from cli.examine.findings import Finding, Subject
from cli.supervise.ports import AddressError, reserve_port
from poc_core.machine_figures import is_short_of_memory

_DISK, _MEMORY, _PORT = map(Subject, ("disk", "memory", "port"))

_GIB = 1024**3
_LOOK_S = 3.0
# Redis' append-only file grows to about twice its contents before it is rewritten.
LEAST_DATA_GIB = 2.0
SOME_DATA_GIB = 10.0


def disk(what: str, path: Path, least_gib: float, some_gib: float) -> Iterator[Finding]:
    """Checks the free disk space. Below `least_gib` is a problem, below `some_gib` a warning."""
    free = free_bytes(path) / _GIB
    text = f"{free:.1f} GiB are free for {what} ({path})"
    if free < least_gib:
        yield _DISK.problem(f"{text}.", "Make room, or choose a place on another disk.")
    elif free < some_gib:
        yield _DISK.warning(f"{text}.", f"{some_gib:.0f} GiB are safer: make room.")
    else:
        yield _DISK.ok(text)


def memory(left: int, limit: int) -> Iterator[Finding]:
    text = f"{left / _GIB:.1f} of {limit / _GIB:.1f} GiB of memory are left"
    if is_short_of_memory(left, limit):
        remedy = "End what uses it (ps aux --sort -rss), or raise the container's limit."
        yield _MEMORY.problem(f"{text}: the kernel may end an engine.", remedy)
    else:
        yield _MEMORY.ok(text)


def port(host: str, number: int) -> Iterator[Finding]:
    """Checks whether the API can listen on the port. A node that already listens is no problem."""
    try:
        reserve_port(host, number)
    except AddressError as error:
        if _is_a_node(host, number):
            yield _PORT.ok(
                f"A node answers at {host} port {number} already; a second one needs another --port"
            )
            return
        yield _PORT.problem(str(error), f"`ss -ltnp 'sport = :{number}'` shows what uses it.")
        return
    yield _PORT.ok(f"the API can listen on {host} port {number}")


def _is_a_node(host: str, number: int) -> bool:
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    try:
        answer = httpx.get(f"http://{loopback}:{number}/livez", timeout=_LOOK_S, trust_env=False)
        return answer.status_code == 200 and answer.json() == {"status": "ok"}
    except (httpx.HTTPError, ValueError):
        return False
