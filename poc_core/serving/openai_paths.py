"""Paths of a worker's vLLM that the API passes on: OpenAI's and the like, none that administer."""

import re
from collections.abc import Iterable
from functools import cache

# Below these prefixes the API passes on every path that does not administer.
FOLDERS = ("/v1/", "/v2/", "/cohere/v2/")
# Elsewhere most of vLLM's paths administer, so those that have the model compute are named.
ELSEWHERE = (
    "/tokenize",
    "/detokenize",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/generative_scoring",
)
# Paths of a worker of an earlier release, which tells none.
USUAL = (
    "POST /tokenize",
    "POST /detokenize",
    *(
        f"POST /v1/{name}"
        for name in ("chat/completions", "completions", "responses", "embeddings")
    ),
)
_METHODS = ("GET", "POST", "DELETE")
# Words of paths that change the engine or look into it, as /v1/load_lora_adapter does.
_ADMINISTRATIVE = re.compile(
    "abort|adapter|admin|cache|config|debug|fault|load|lora|metrics|pause|profile|resume|rpc|scal(e|ing)|server|"
    "shutdown|sleep|wake|weight"
)
_PARAMETER = re.compile(r"\\{\w+\\}")  # as re.escape writes a route's {name}


def passed_on(routes: Iterable[tuple[str, str]]) -> list[str]:
    """The routes (method, path) of a server that the API passes on, as "POST /v1/score"."""
    return sorted(
        {f"{method} {path}" for method, path in routes if method in _METHODS and _is_clients(path)}
    )


def is_among(paths: Iterable[str], method: str, path: str) -> bool:
    """Whether one of `paths` (see passed_on) means this request.

    A parameter is a word, so no later reader of `path` can take it for another path.
    """
    return any(_pattern(one).fullmatch(f"{method} {path}") for one in paths)


def _is_clients(path: str) -> bool:
    if path in ELSEWHERE:
        return True
    return (
        path.startswith(FOLDERS)
        and not _ADMINISTRATIVE.search(path)
        and not re.search(r"\{\w+:", path)
    )


@cache
def _pattern(one: str) -> re.Pattern[str]:
    return re.compile(_PARAMETER.sub(r"[\\w-]+", re.escape(one)), re.ASCII)
