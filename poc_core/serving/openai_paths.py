"""Paths of a worker's vLLM that the API passes on: those whose requests api/chat/bounds.py bounds.

All others are 404, whatever a release of vLLM adds.
"""

import re
from collections.abc import Iterable
from functools import cache

# Below these prefixes every path that is not passed on is answered in OpenAI's form.
FOLDERS = ("/v1/", "/v2/", "/cohere/v2/")
# Those of vLLM's paths elsewhere that have the model compute.
ELSEWHERE = (
    "/tokenize",
    "/detokenize",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/generative_scoring",
)
# An answer that one engine keeps, by its id.
STORED = (
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
)
# The allow list: of vLLM 0.25.1 to 0.33 what clients ask for.
PASSED_ON = (
    "POST /v1/chat/completions",
    "POST /v1/chat/completions/batch",
    "POST /v1/chat/completions/render",
    "POST /v1/completions",
    "POST /v1/completions/render",
    "POST /v1/responses",
    "POST /v1/responses/render",
    *STORED,
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/messages/render",
    "POST /cohere/v2/chat",
    "POST /cohere/v2/chat/render",
    "POST /tokenize",
    "POST /detokenize",
    "POST /v1/embeddings",
    "POST /v2/embed",
    "POST /score",
    "POST /v1/score",
    "POST /rerank",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /pooling",
    "POST /classify",
    "POST /v1/audio/transcriptions",
    "POST /v1/audio/translations",
    "GET /v1/models",
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
_PARAMETER = re.compile(r"\\{\w+\\}")  # as re.escape writes a route's {name}


def is_clients_path(path: str) -> bool:
    """True if the path is one of a model's clients: OpenAI's, Anthropic's and the like."""
    return path.startswith(FOLDERS) or path in ELSEWHERE


def passed_on(routes: Iterable[tuple[str, str]]) -> list[str]:
    """The routes (method, path) of a server that the API passes on, as "POST /v1/score"."""
    return sorted({f"{method} {path}" for method, path in routes} & {*PASSED_ON})


def is_among(paths: Iterable[str], method: str, path: str) -> bool:
    """True if one of `paths` (see passed_on) means this request.

    A parameter is a word, so no later reader of `path` can take it for another path.
    """
    return any(_pattern(one).fullmatch(f"{method} {path}") for one in paths)


@cache
def _pattern(one: str) -> re.Pattern[str]:
    return re.compile(_PARAMETER.sub(r"[\\w-]+", re.escape(one)), re.ASCII)
