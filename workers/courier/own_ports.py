"""The node's own ports, to which no callback goes on this machine."""

from __future__ import annotations

from poc_core.state import WorkerRegistry


class OwnPorts:
    """The ports that the settings name, and the chat ports of the live workers."""

    def __init__(self, known: frozenset[int], workers: WorkerRegistry) -> None:
        self._known = known
        self._workers = workers
        self._now = known

    def now(self) -> frozenset[int]:
        """The ports as of the last look."""
        return self._now

    def look(self) -> None:
        """Asks Redis for the ports. For a thread that may wait."""
        self._now = self._known | self._workers.ports()
