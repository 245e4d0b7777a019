"""The node's own ports, to which no callback goes on this machine."""

from __future__ import annotations

from poc_core.state import WorkerRegistry


class OwnPorts:
    """Those that the settings name, and the chat ports of the workers that live."""

    def __init__(self, known: frozenset[int], workers: WorkerRegistry) -> None:
        self._known = known
        self._workers = workers
        self._now = known

    def now(self) -> frozenset[int]:
        """As of the last look."""
        return self._now

    def look(self) -> None:
        """Asks Redis. For a thread that may wait for it."""
        self._now = self._known | self._workers.ports()
