"""Reads Redis once for concurrent requests that need the same data."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from anyio import to_thread

T = TypeVar("T")

# Most seconds that one read delays the next, so that a silent Redis does not delay all requests.
_PATIENCE_S = 0.25

_Outcome = tuple[Any, Exception | None]


@dataclass
class _Turn:
    """The state of one event loop: the reads requested next, and the task that runs reads."""

    asked: dict[Hashable, tuple[Callable[[], Any], asyncio.Future[_Outcome]]] = field(
        default_factory=dict
    )
    reader: asyncio.Task[None] | None = None


class Together:
    """Lets concurrent requests share a read. No request gets a read that began before itself."""

    def __init__(self) -> None:
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn] = WeakKeyDictionary()

    async def get(self, key: Hashable, read: Callable[[], T]) -> T:
        """Returns the result of `read`, run once in a thread for all waiting requests of `key`."""
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(loop, _Turn())
        if key not in turn.asked:
            turn.asked[key] = read, loop.create_future()
        if turn.reader is None or turn.reader.done():
            turn.reader = asyncio.create_task(_read_in_turns(turn))
        found: T
        # A client that disconnects must not cancel the reading for the others.
        found, error = await asyncio.shield(turn.asked[key][1])
        if error is not None:
            raise error
        return found


async def _read_in_turns(turn: _Turn) -> None:
    while turn.asked:
        asked, turn.asked = turn.asked, {}
        reading = asyncio.create_task(_read(list(asked.values())))
        await asyncio.wait([reading], timeout=_PATIENCE_S)


async def _read(asked: list[tuple[Callable[[], Any], asyncio.Future[_Outcome]]]) -> None:
    try:
        outcomes = await to_thread.run_sync(lambda: [_outcome(read) for read, _ in asked])
    except Exception as error:  # no thread can be started
        outcomes = [(None, error)] * len(asked)
    for (_, answer), outcome in zip(asked, outcomes, strict=True):
        answer.set_result(outcome)


def _outcome(read: Callable[[], Any]) -> _Outcome:
    try:
        return read(), None
    except Exception as error:
        return None, error
