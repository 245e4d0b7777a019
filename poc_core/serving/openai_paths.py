"""The paths that the API forwards to a worker's vLLM (limits: poc_core/chat_bounds.py). All other
paths get 404, including paths that a new release of vLLM adds.
"""

import re
from collections.abc import Iterable
from functools import cache

# Errors of paths with these prefixes have OpenAI's form (below /v1/messages Anthropic's).
FOLDERS = ("/v1/", "/v2/", "/cohere/v2/")
# Further paths of vLLM that run the model.
ELSEWHERE = (
    "/tokenize",
    "/detokenize",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/generative_scoring",
)
# Paths of a stored answer, which only one engine has.
STORED = (
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
)
# The allow list: client paths of vLLM 0.25.1 to 0.33.
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
