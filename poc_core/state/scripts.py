"""Loads the Lua scripts: each consists of the parts of lua/common.lua that it uses, and its file.

Redis keeps scripts only in memory and loses them in a restart, a failover or SCRIPT FLUSH. If
processes have separate Redis users, only the API's may load scripts (docker/users.acl): an endless
script would block Redis. The API loads all scripts (`load_all`); other processes wait for them as
for an unavailable Redis.
"""

import hashlib
import re
import time
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.commands.core import Script
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
    """Redis lost the scripts and this user may not load them; like an unavailable Redis."""

    def __init__(self) -> None:
        super().__init__(
            "Redis has not (or not any more) the scripts of this node, and this user may not load"
            " them; a running `proofline api` does within seconds"
        )


class SharedScript(Script):
    """A script that another user loads if the caller may not."""

    def __call__(
        self,
        keys: Sequence[Any] | None = None,
        args: Iterable[Any] | None = None,
        client: Any = None,
    ) -> Any:
        """Runs the script and returns its result. ScriptsMissingError: Redis lacks it."""
        client = self.registered_client if client is None else client
        if isinstance(client, Pipeline):  # redis-py would load it there, even without permission
            self._make_sure()
        given = (self.sha, len(keys or ()), *(keys or ()), *(args or ()))
        try:
            return client.evalsha(*given)
        except NoScriptError:
            _load(self.registered_client, self.script)
            return client.evalsha(*given)

    def _make_sure(self) -> None:
        if not self.registered_client.script_exists(self.sha)[0]:
            _load(self.registered_client, self.script)


Call = tuple[Script, Sequence[Any], Sequence[Any]]
"""A script with its keys and args."""


def together(redis: "Redis", *calls: Call) -> list[Any]:
    """Sends calls in one request and returns their results. They run in order, not atomically;
    calls whose scripts Redis lacks run last.
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


def load(redis: "Redis", name: str) -> Script:
    """Returns lua/{name}.lua, callable with keys and args; survives a restart of Redis."""
    return SharedScript(redis, whole(name))


def of_store(name: str) -> "cached_property[Script]":
    """Makes a script an attribute of Stores."""
    return cached_property(lambda store: load(store._redis, name))  # noqa: SLF001


def load_all(redis: "Redis", others: Sequence[str] = ()) -> None:
    """Loads the node's scripts that Redis lacks, and `others`, given as texts.

    ScriptsMissingError: one is missing and this user may not load scripts.
    """
    scripts = [*map(whole, _names()), *others]
    shas = _shas(tuple(scripts))
    for script, is_there in zip(scripts, redis.script_exists(*shas), strict=True):
        if not is_there:
            _load(redis, script)


def wait_until_loaded(redis: "Redis", timeout_s: float) -> None:
    """Loads the scripts, or waits until an API has. ScriptsMissingError: after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return load_all(redis)
        except ScriptsMissingError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def _load(redis: Any, script: Any) -> None:
    try:
        redis.script_load(script)
    except NoPermissionError as error:
        raise ScriptsMissingError() from error


@cache
def whole(name: str) -> str:
    """Returns the script `name` as in Redis.

    Unused functions of common.lua are left out: Redis makes all again per call, which took 4 µs.
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
def _shas(scripts: tuple[str, ...]) -> list[str]:
    return [hashlib.sha1(script.encode()).hexdigest() for script in scripts]
