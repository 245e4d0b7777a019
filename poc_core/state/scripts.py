"""Loads the Lua scripts: each is lua/common.lua followed by its own file."""

from functools import cache
from importlib.resources import files

from redis import Redis
from redis.commands.core import Script


def load(redis: "Redis", name: str) -> Script:
    """The script lua/{name}.lua, callable with keys and args; survives a restart of Redis."""
    return redis.register_script(source("common") + source(name))


@cache
def source(name: str) -> str:
    return (files("poc_core.state") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
