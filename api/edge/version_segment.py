"""Removes a version at the beginning of a path, such as /v3.0.16/api/v1/state."""

from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from poc_core.serving.openai_paths import ELSEWHERE, FOLDERS

# First segments of all paths of this API: our own, and paths of vLLM's server outside /v1.
FIRST_SEGMENTS = frozenset(
    {
        *("api", "health", "livez", "readyz", "ready", "metrics", "docs", "openapi.json"),
        *(path.split("/")[1] for path in (*ELSEWHERE, *FOLDERS)),
    }
)
# If one of these follows v1 or v2, the v1 or v2 is a version: no path of this API begins so.
_NEVER_BELOW_V = frozenset({"api", "v1", "health", "livez", "readyz"})


class VersionSegment:
    """Middleware that removes a path's first segment if the rest is a path of this API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            raw: bytes = scope.get("raw_path") or scope["path"].encode()
            rest = without_version(raw)
            if rest is not None:
                scope = {
                    **scope,
                    "path": unquote(rest.decode("ascii", "replace")),
                    "raw_path": rest,
                }
        await self._app(scope, receive, send)


def without_version(raw_path: bytes) -> bytes | None:
    """Returns a raw path without the version at its beginning; None if there is no version."""
    segments = raw_path.decode("latin-1").split("/")  # the first segment is empty
    if len(segments) < 3 or not segments[1]:
        return None
    first, second = segments[1:3]
    is_ours = second not in _NEVER_BELOW_V if first in ("v1", "v2") else first in FIRST_SEGMENTS
    if is_ours or second not in FIRST_SEGMENTS:
        return None
    return "/".join(["", *segments[2:]]).encode("latin-1")
