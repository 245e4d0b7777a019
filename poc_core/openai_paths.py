"""Which paths of a worker's vLLM the API passes on: OpenAI's and their like, and never those that administer it."""

import re
from collections.abc import Iterable
from functools import cache

# What is passed on beside /v1, and what a worker of an earlier release serves, which tells no paths.
_WITHOUT_V1 = ("POST /tokenize", "POST /detokenize")
USUAL = (*_WITHOUT_V1, *(f"POST /v1/{name}" for name in ("chat/completions", "completions", "responses", "embeddings")))
_METHODS = ("GET", "POST", "DELETE")
# Words of paths that change the engine or look into it; /v1/load_lora_adapter is one that vLLM has under /v1.
_ADMINISTRATIVE = re.compile(
    "abort|adapter|admin|cache|config|debug|fault|load|lora|metrics|pause|profile|resume|rpc|scal(e|ing)|server|"
    "shutdown|sleep|wake|weight"
)
_PARAMETER = re.compile(r"\\{\w+\\}")  # as re.escape writes a route's {name}


def passed_on(routes: Iterable[tuple[str, str]]) -> list[str]:
    """Of (method, path) of a server's routes those that the API passes on, as "POST /v1/score"."""
    found = {f"{method} {path}" for method, path in routes if method in _METHODS and _is_clients(path)}
    return sorted(found | {one for one in _WITHOUT_V1 if tuple(one.split()) in set(routes)})


def is_among(paths: Iterable[str], method: str, path: str) -> bool:
    """Whether one of `paths` (see passed_on) means this request. A parameter is a word, so that nothing in `path` could
    mean another path to whoever reads it next."""
    return any(_pattern(one).fullmatch(f"{method} {path}") for one in paths)


def _is_clients(path: str) -> bool:
    return path.startswith("/v1/") and not _ADMINISTRATIVE.search(path) and not re.search(r"\{\w+:", path)


@cache
def _pattern(one: str) -> re.Pattern[str]:
    return re.compile(_PARAMETER.sub(r"[\\w-]+", re.escape(one)), re.ASCII)
