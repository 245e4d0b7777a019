"""An API that notes where it asks for each turn of a conversation, and why not where the last was.

    python -m bench.prefix_routing.noted FILE api --port 8100

appends to FILE, and is otherwise `proofline api`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from api.chat import gateway
from api.chat.prefixes import Prefix, PrefixMemory, share
from poc_core.records import WorkerRecord


class Why(StrEnum):
    """Why a turn was not asked for where the turn before was."""

    FULL = "its engine had its share of the requests"
    GONE = "its engine was gone"
    OTHER = "for no reason"


class Move(NamedTuple):
    conversation: str
    worker: str  # that it left
    why: Why


class NotedMemory(PrefixMemory):
    """Writes a line for each order of workers that it gives, and for each worker that is asked."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._last: dict[str, str] = {}  # conversation -> the worker that was asked last

    def order(
        self, prefix: Prefix, workers: Sequence[WorkerRecord], active: Callable[[str], int]
    ) -> list[WorkerRecord]:
        found = super().order(prefix, workers, active)
        last = self._last.get(_conversation(prefix))
        if last is None or found[0].id == last:
            why = None
        elif last not in {worker.id for worker in workers}:
            why = Why.GONE
        else:
            why = Why.FULL if active(last) >= share(workers, active) else Why.OTHER
        self._note(prefix, turn=why)
        return found

    def remember(self, prefix: Prefix, worker_id: str) -> None:
        super().remember(prefix, worker_id)
        self._last[_conversation(prefix)] = worker_id
        self._note(prefix, asked=worker_id)

    def _note(self, prefix: Prefix, **fields: Any) -> None:
        print(json.dumps({"of": _conversation(prefix)} | fields), file=self._file, flush=True)


def moves(lines: Iterable[str]) -> Iterator[Move]:
    """What the lines that a NotedMemory wrote tell of turns, in the order in which they ended.

    The worker of a turn is the one that was asked last: those before it did not answer.
    """
    had: dict[str, str] = {}  # conversation -> the worker of its last turn that is over
    under_way: dict[str, _Turn] = {}

    def over(of: str, turn: _Turn) -> Iterator[Move]:
        if turn.asked and (last := had.get(of, turn.asked)) != turn.asked:
            yield Move(of, last, turn.why or Why.GONE)
        had[of] = turn.asked or had.get(of, "")

    for line in map(json.loads, lines):
        of = line["of"]
        if "asked" in line:
            under_way[of].asked = line["asked"]
            continue
        if of in under_way:
            yield from over(of, under_way[of])
        under_way[of] = _Turn(line["turn"] and Why(line["turn"]))
    for of, turn in under_way.items():
        yield from over(of, turn)


@dataclass
class _Turn:
    why: Why | None  # why not the worker of the last turn was to be asked first; None: it was
    asked: str = ""  # the worker that was asked last


def _conversation(prefix: Prefix) -> str:
    return prefix.blocks[prefix.opening - 1].hex() if prefix.blocks else ""


if __name__ == "__main__":
    with Path(sys.argv.pop(1)).open("a") as file:
        gateway.PrefixMemory = lambda: NotedMemory(file)  # type: ignore[assignment,misc]
        from cli.main import app

        app()
