"""Loads the Lua scripts. A script is its file, after the functions of lua/common.lua that it uses.

Redis loses scripts in a restart, a failover or SCRIPT FLUSH. If processes have separate users of
Redis, only the API's user may load scripts (docker/users.acl), because an endless script would
block Redis. The API loads all scripts (`load_all`). Other processes treat missing scripts like an
unavailable Redis, and wait.
"""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError, NoPermissionError, NoScriptError

_FOLDER = files("poc_core.state") / "lua"
_COMMON = "common"
_WORD = re.compile(r"\w+")
# A definition in common.lua, or a comment between definitions.
_PART = re.compile(r"^(?=local |--)", re.MULTILINE)
_DEFINED = re.compile(r"local (?:function )?(\w+)")
# Seconds between two checks whether an API has loaded the scripts.
_LOOK_S = 0.2


class ScriptsMissingError(ConnectionError):
    """Redis lacks scripts that this process's user may not load. Handled like a lost connection."""

    def __init__(self) -> None:
        super().__init__(
            "Redis lacks the scripts of this node, and this user may not load them; a running"
            " `proofline api` loads them within seconds"
        )


class SharedScript:
    """A Lua script. A call loads the script if Redis lacks it, and if this user may load it."""

    def __init__(self, redis: Any, text: str) -> None:
        self._redis, self._text, self.sha = redis, text, _sha(text)

    def __call__(
        self, keys: Sequence[Any] = (), args: Sequence[Any] = (), client: Any = None
    ) -> Any:
        """Runs the script and returns its result. `client`: the client or pipeline to use, which
        kombu and redis-py's locks pass. ScriptsMissingError if this user may not load the script.
        """
        redis = self._redis if client is None else client
        if isinstance(redis, Pipeline) and not self._redis.script_exists(self.sha)[0]:
            _load(self._redis, self._text)
        call = (self.sha, len(keys), *keys, *args)
        try:
            return redis.evalsha(*call)
        except NoScriptError:
            _load(redis, self._text)
            return redis.evalsha(*call)


Call = tuple[SharedScript, Sequence[Any], Sequence[Any]]
"""A script with its keys and args."""


def together(redis: Redis, *calls: Call) -> list[Any]:
    """Runs several scripts in one request, in order, not atomically. Returns their results. Scripts
    that Redis lacks are loaded and run last.
    """
    with redis.pipeline(transaction=False) as pipe:
        for script, keys, args in calls:
            pipe.evalsha(script.sha, len(keys), *keys, *args)
        answers = pipe.execute(raise_on_error=False)
    for index, answer in enumerate(answers):
        if isinstance(answer, NoScriptError):
            script, keys, args = calls[index]
            answers[index] = script(keys, args)
        elif isinstance(answer, Exception):
            raise answer
    return answers


def load(redis: Redis, name: str) -> SharedScript:
    """Returns lua/{name}.lua as a script that is called with keys and args."""
    return SharedScript(redis, whole(name))


class BaseStore:
    """Base class of the stores in Redis."""

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.time) -> None:
        """`clock`: returns seconds since the epoch."""
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._clock = clock


def of_store(name: str) -> "cached_property[SharedScript]":
    """Returns a cached property for a store class. Its value is the script lua/{name}.lua."""
    return cached_property(lambda store: load(store._redis, name))  # noqa: SLF001


def load_all(redis: Redis, others: Sequence[str] = ()) -> None:
    """Loads the node's scripts and `others` (texts) if Redis lacks them. ScriptsMissingError if
    this user is not allowed to.
    """
    texts = [*map(whole, _names()), *others]
    for text, is_there in zip(texts, redis.script_exists(*map(_sha, texts)), strict=True):
        if not is_there:
            _load(redis, text)


def wait_until_loaded(redis: Redis, timeout_s: float) -> None:
    """Loads the node's scripts, or waits until an API has loaded them. Raises ScriptsMissingError
    if scripts are still missing after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return load_all(redis)
        except ScriptsMissingError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def _load(redis: Any, text: str) -> None:
    try:
        redis.script_load(text)
    except NoPermissionError as error:
        raise ScriptsMissingError() from error


@cache
def whole(name: str) -> str:
    """Returns lua/{name}.lua after the functions of lua/common.lua that it uses. Leaves out unused
    functions, because Redis creates all functions again in each call (4 µs).
    """
    text, found = source(name), ""
    words = set(_WORD.findall(text))
    for part in reversed(_PART.split(source(_COMMON))):
        defined = _DEFINED.match(part)
        if defined and defined[1] in words:
            words |= set(_WORD.findall(part))
            found = part + found
    return found + text


@cache
def source(name: str) -> str:
    """Returns the text of lua/{name}.lua."""
    return (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


@cache
def _names() -> tuple[str, ...]:
    names = (file.name.removesuffix(".lua") for file in _FOLDER.iterdir())
    return tuple(sorted(name for name in names if name != _COMMON))


@cache
def _sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()
