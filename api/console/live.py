"""Streams the node's state to open console pages. One task reads Redis for all pages."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from anyio import to_thread
from pydantic import JsonValue

log = logging.getLogger(__name__)

# Seconds between two reads of the node's state.
PAUSE_S = 1.0
# Seconds until a page must request the stream again, so that a revoked key stops working.
LONGEST_S = 600.0
# Largest number of open pages, for one API process.
MOST_PAGES = 500

Sections = Mapping[str, JsonValue]
Read = Callable[[], Sections]


class Live:
    """Reads the node's state each second while pages are open, and streams it to these pages."""

    def __init__(self, pause_s: float = PAUSE_S, longest_s: float = LONGEST_S) -> None:
        self._pause_s = pause_s
        self._longest_s = longest_s
        self.followers = 0
        self._deserted = asyncio.Event()  # set when the last follower has left
        self._news = asyncio.Event()  # replaced after each reading
        self._reader: asyncio.Task[None] | None = None
        self._reading = 0  # number of the latest reading
        # name -> the number of the reading in which the section last changed, and its JSON
        self._sections: dict[str, tuple[int, str]] = {}

    @property
    def is_reading(self) -> bool:
        return self._reader is not None

    async def follow(self, begin: Callable[[], Read]) -> AsyncGenerator[bytes]:
        """Yields server-sent events: first all sections, then the sections that changed.

        A slow page skips intermediate states, but always gets the latest one. `begin`: called when
        the first page opens; returns the function that reads all sections, which runs in a thread.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._longest_s
        self.followers += 1
        self._deserted.clear()
        if self._reader is None:
            self._reading, self._sections = 0, {}
            self._reader = asyncio.create_task(self._run(begin()))
        seen = 0
        try:
            while loop.time() < ends_at:
                news = self._news
                changed = {
                    name: text for name, (reading, text) in self._sections.items() if reading > seen
                }
                seen = self._reading
                if changed:
                    yield _event(changed)
                await news.wait()
        finally:
            self.followers -= 1
            if not self.followers:
                self._deserted.set()

    async def _run(self, read: Read) -> None:
        """Reads all sections repeatedly, until the last page has left."""
        try:
            while not self._deserted.is_set():
                try:
                    found = await to_thread.run_sync(lambda: _texts(read()))
                except Exception as error:  # a bug, or no thread can be started
                    found = _problem(error)
                self._update(found)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s):
                        await self._deserted.wait()
        finally:
            self._reader = None

    def _update(self, found: Mapping[str, str]) -> None:
        self._reading += 1
        for name, text in found.items():
            if name not in self._sections or self._sections[name][1] != text:
                self._sections[name] = self._reading, text
        news, self._news = self._news, asyncio.Event()
        news.set()


def _problem(error: Exception) -> dict[str, str]:
    """Returns a section `problem`: pages show it, and the next reading may work."""
    log.error("the console's reading failed", exc_info=error)
    why = type(error).__name__
    problem = f"The API could not read the node's state ({why}); its log has the reason."
    return _texts({"problem": problem})


def _texts(sections: Sections) -> dict[str, str]:
    return {name: json.dumps(value, separators=(",", ":")) for name, value in sections.items()}


def _event(sections: Mapping[str, str]) -> bytes:
    parts = ",".join(f'"{name}":{text}' for name, text in sections.items())
    return f"data: {{{parts}}}\n\n".encode()
