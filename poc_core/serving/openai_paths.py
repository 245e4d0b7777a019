"""The paths that the API forwards to a worker's vLLM (limits: poc_core/chat_bounds.py). All other
paths get 404, including paths that a new release of vLLM adds.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Literal

# Errors of paths with these prefixes have OpenAI's form (below /v1/messages Anthropic's).
FOLDERS = ("/v1/", "/v2/", "/cohere/v2/")

Kind = Literal["answers", "inputs", "tokens", "form"]

# Client paths of vLLM 0.25.1 to 0.33, and what a path computes: answers of tokens, one vector or
# score for each input, only tokens, or answers to a form instead of JSON. The second entry lists
# the fields whose entries are prompts.
PATHS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "/v1/chat/completions": ("answers", ("messages",)),
    "/v1/chat/completions/batch": ("answers", ("messages",)),
    "/v1/completions": ("answers", ("prompt",)),
    "/v1/responses": ("answers", ("input",)),
    "/v1/messages": ("answers", ("messages",)),
    "/cohere/v2/chat": ("answers", ("messages",)),
    "/v1/chat/completions/render": ("tokens", ("messages",)),
    "/v1/completions/render": ("tokens", ("prompt",)),
    "/v1/responses/render": ("tokens", ("input",)),
    "/v1/messages/render": ("tokens", ("messages",)),
    "/v1/messages/count_tokens": ("tokens", ("messages",)),
    "/cohere/v2/chat/render": ("tokens", ("messages",)),
    "/tokenize": ("tokens", ("prompt", "messages")),
    "/detokenize": ("tokens", ("tokens",)),
    "/v1/embeddings": ("inputs", ("input", "messages")),
    "/v2/embed": ("inputs", ("texts", "images", "inputs")),
    "/pooling": ("inputs", ("input", "messages", "data")),
    "/classify": ("inputs", ("input", "messages")),
    **dict.fromkeys(
        ("/score", "/v1/score"),
        ("inputs", ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2")),
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), ("inputs", ("query", "documents"))),
    "/v1/audio/transcriptions": ("form", ()),
    "/v1/audio/translations": ("form", ()),
}
# Paths outside FOLDERS that run the model.
ELSEWHERE = (*(path for path in PATHS if not path.startswith(FOLDERS)), "/generative_scoring")
# Paths of a stored answer, which only one engine has.
STORED = (
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
)
# The allow list.
PASSED_ON = (*(f"POST {path}" for path in PATHS), *STORED, "GET /v1/models")
# Paths of workers of an earlier release, which do not report their paths.
USUAL = (
    *(
        f"POST /v1/{name}"
        for name in ("chat/completions", "completions", "responses", "embeddings")
    ),
    "POST /tokenize",
    "POST /detokenize",
)
_PARAMETER = re.compile(r"\\{\w+\\}")  # as re.escape writes a route's {name}


def is_clients_path(path: str) -> bool:
    """Returns True if clients of a model use the path, such as OpenAI's or Anthropic's paths."""
    return path.startswith(FOLDERS) or path in ELSEWHERE


def passed_on(routes: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the routes in `routes` that the API forwards to workers, such as "POST /v1/score"."""
    return sorted({f"{method} {path}" for method, path in routes} & {*PASSED_ON})


def is_among(paths: Iterable[str], method: str, path: str) -> bool:
    """Returns True if a request matches one of `paths` (see `passed_on`). Path parameters match
    only [\\w-]+, so that no server reads `path` as another path.
    """
    return any(_pattern(one).fullmatch(f"{method} {path}") for one in paths)


@cache
def _pattern(one: str) -> re.Pattern[str]:
    return re.compile(_PARAMETER.sub(r"[\\w-]+", re.escape(one)), re.ASCII)
