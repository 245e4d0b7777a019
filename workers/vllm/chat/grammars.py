"""Tries each grammar in a separate process before vLLM gets it. vLLM parses grammars on its
server's event loop and compiles them in its core, where nothing can stop the compilation: a schema
of sixty bytes ({"maxLength": 1000}) took half a minute, during which all other grammars waited.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from poc_core.fair_queue import Tags
from workers.vllm.chat.errors import BadRequest, Unavailable
from workers.vllm.chat.grammar_process import WRONG, parts

logger = logging.getLogger(__name__)

# Seconds that a grammar may take to compile.
LONGEST_S = 10.0
# Seconds after which a trial is postponed if a client that has used less time is waiting.
SHARE_S = 1.0
# Seconds for the process to start (it imports as much as a model does), seconds that a request
# waits for the start, and seconds after a failed start until another try.
_START_S, PATIENCE_S, _AGAIN_S = 120.0, 60.0, 60.0
# Grammars that were compiled and need no further trial.
_REMEMBERED = 4096

_BUSY = "This machine is too busy to try grammars now; ask again."
_ANY_OBJECT = '{"type": "object"}'  # vLLM's schema for json_object
# Ends the current trial.
_END = b"null"
PROCESS = (sys.executable, "-m", "workers.vllm.chat.grammar_process")


@dataclass(eq=False)
class _Trial:
    client: str
    asked: bytes
    # the grammar's error; "" if it was compiled, None if it could not be tried
    answer: asyncio.Future[str | None]
    began_at: float = 0.0


class Grammars:
    """Checks grammars in a process that the first grammar starts. For one event loop."""

    def __init__(
        self,
        vocabulary: Callable[[], str],
        command: Sequence[str] = PROCESS,
        longest_s: float = LONGEST_S,
        share_s: float = SHARE_S,
        patience_s: float = PATIENCE_S,
        is_final: bool = True,
    ) -> None:
        """`vocabulary()` returns the tokenizer in the process's format, which takes a second.
        `is_final`: False if vLLM tries another compiler after xgrammar reports an error.
        """
        self._vocabulary = vocabulary
        self._command = command
        self._patience_s = patience_s
        self._is_final = is_final
        self._is_up = asyncio.Event()  # set while the process runs
        self._failed_at = -_AGAIN_S  # when the process last failed to start
        self._longest_s, self._share_s = longest_s, share_s
        self._good: LRUCache[bytes, bool] = LRUCache(_REMEMBERED)  # by their hashes
        self._tags = Tags()
        self._waiting: list[_Trial] = []
        self._works: asyncio.Task[None] | None = None
        self._process: _Process | None = None
        self._came = asyncio.Event()

    async def check(self, kind: str, text: str, client: str) -> None:
        """Waits until the grammar is compiled, or the client disconnects. BadRequest if the grammar
        is invalid, or takes too much time or memory. Unavailable if the process is still starting,
        if other processes take the CPU, or if the process cannot check a grammar that vLLM's server
        does not parse itself.
        """
        asked = json.dumps([kind, text]).encode()
        digest = hashlib.sha256(asked).digest()
        if self._good.get(digest):
            return
        trial = _Trial(client, asked, asyncio.get_running_loop().create_future())
        self._waiting.append(trial)
        self._came.set()
        if self._works is None or self._works.done():
            self._works = asyncio.get_running_loop().create_task(self._work())
        await self._wait_for_process(trial)
        wrong = await trial.answer
        if wrong is None:
            if self._is_final:  # vLLM's server leaves parsing to this trial
                raise Unavailable("This worker cannot try grammars now, see its log; ask again.")
            return
        if wrong and (self._is_final or not wrong.startswith(WRONG)):
            raise BadRequest(f"The grammar {wrong}.", "structured_outputs")
        self._good[digest] = True

    async def _wait_for_process(self, trial: _Trial) -> None:
        is_up = asyncio.ensure_future(self._is_up.wait())
        try:
            first: set[asyncio.Future[Any]] = {is_up, trial.answer}
            done, _ = await asyncio.wait(
                first, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise Unavailable(_BUSY)
        except BaseException:
            trial.answer.cancel()
            raise
        finally:
            is_up.cancel()

    async def close(self) -> None:
        if self._works is not None:
            self._works.cancel()
            await asyncio.gather(self._works, return_exceptions=True)
        await self._end()

    async def _work(self) -> None:
        while trial := self._next():
            try:
                await self._run(trial)
            except Exception:
                logger.exception("a grammar cannot be tried")
                _resolve(trial, None)
                await self._end()

    def _next(self) -> _Trial | None:
        self._waiting = [trial for trial in self._waiting if not trial.answer.done()]
        if not self._waiting:
            return None
        trial = min(self._waiting, key=lambda one: self._tags.of(one.client))
        self._waiting.remove(trial)
        return trial

    async def _run(self, trial: _Trial) -> None:
        process = await self._started()
        trial.began_at = time.monotonic()
        process.ask(trial.asked)
        reading = asyncio.ensure_future(process.answer())
        try:
            while not reading.done() and not self._is_over(trial):
                self._came.clear()
                came = asyncio.ensure_future(self._came.wait())
                first: set[asyncio.Future[Any]] = {reading, came, trial.answer}
                await asyncio.wait(
                    first,
                    timeout=self._share_s / 4,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                came.cancel()
            if not reading.done():
                process.ask(_END)
            said = await reading
        finally:  # `close` reads the same stream, which allows one reader
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        took_s = time.monotonic() - trial.began_at
        self._tags.spend(trial.client, took_s)
        if isinstance(said, str):
            _resolve(trial, said)
        elif took_s > self._longest_s:
            longest = f"takes longer to compile than {self._longest_s:g} s; use a simpler one"
            had_no_cpu = said < self._longest_s / 4
            _resolve(trial, Unavailable(_BUSY) if had_no_cpu else longest)
        elif not trial.answer.done():
            self._waiting.append(trial)  # starts again at its next turn

    def _is_over(self, trial: _Trial) -> bool:
        """Returns True if the client left, or if the trial is too slow or delays another client."""
        took_s = time.monotonic() - trial.began_at
        if trial.answer.done() or took_s > self._longest_s:
            return True
        had_s = self._tags.of(trial.client) + took_s
        return took_s > self._share_s and any(
            one.client != trial.client and self._tags.of(one.client) + self._share_s < had_s
            for one in self._waiting
            if not one.answer.done()
        )

    async def _started(self) -> _Process:
        if time.monotonic() - self._failed_at < _AGAIN_S:
            raise RuntimeError("the process that tries grammars did not begin")
        if self._process is None:
            try:
                vocabulary = await asyncio.to_thread(self._vocabulary)
                self._process = await _Process.start(self._command, vocabulary)
            except Exception:
                self._failed_at = time.monotonic()
                raise
            self._is_up.set()
        return self._process

    async def _end(self) -> None:
        self._is_up.clear()
        process, self._process = self._process, None
        if process is not None:
            await process.kill()


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._input, self._output = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, command: Sequence[str], vocabulary: str) -> _Process:
        """Starts a process and waits until it is ready. Raises RuntimeError if the process ends,
        TimeoutError if it is not ready after _START_S seconds.
        """
        pipe = asyncio.subprocess.PIPE
        # In a group of its own, so that `kill` also ends the child that tries a grammar.
        started = asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True
        )
        found = cls(await started)
        try:
            found.ask(vocabulary.encode())
            async with asyncio.timeout(_START_S):
                await found._line()
        except BaseException:
            await found.kill()
            raise
        return found

    def ask(self, line: bytes) -> None:
        self._input.write(line + b"\n")

    async def answer(self) -> str | float:
        """Returns the grammar's error, or "", or the CPU seconds that a killed trial had."""
        found: str | float = json.loads(await self._line())
        return found

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.communicate()

    async def _line(self) -> bytes:
        line = await self._output.readline()
        if not line:
            raise RuntimeError("the process that tries grammars has ended")
        return line


def _resolve(trial: _Trial, found: str | Unavailable | None) -> None:
    if trial.answer.done():
        return
    if isinstance(found, Unavailable):
        trial.answer.set_exception(found)
    else:
        trial.answer.set_result(found)


def schemas_in_tags(body: Any) -> Iterator[Any]:
    """Yields the JSON schemas in a request's structural tags, except the schemas of its tools."""
    tags = [getattr(getattr(body, "structured_outputs", None), "structural_tag", None)]
    form: Any = getattr(body, "response_format", None)
    if getattr(form, "type", None) == "structural_tag":
        tags.append(form.model_dump_json(by_alias=True))
    for tag in tags:
        with suppress(ValueError, RecursionError):  # invalid JSON, which the trial reports
            for kind, text in parts("structural_tag", tag) if isinstance(tag, str) else ():
                if kind == "json":
                    yield json.loads(text)


def text_of(params: Any) -> tuple[str, str] | None:
    """Returns (kind, text) of the grammar in vLLM's StructuredOutputsParams; None without one."""
    for kind in ("json", "regex", "choice", "grammar", "structural_tag"):
        said = getattr(params, kind, None)
        if said is not None:
            return kind, said if isinstance(said, str) else json.dumps(said)
    return ("json", _ANY_OBJECT) if getattr(params, "json_object", None) else None
