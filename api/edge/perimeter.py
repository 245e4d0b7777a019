"""Keeps web pages of strangers away: the operator's browser reaches loopback and private networks.

A page can send what needs no permission of ours: any POST of a plain type, with its own Origin
(CSRF), or with a name of its own that leads to this address as Host (DNS rebinding). The network
node sends JSON without an Origin, and most of it without a Content-Type.
"""

import re
from collections.abc import Collection
from ipaddress import ip_address

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from poc_core.serving.openai_paths import is_clients_path
from poc_core.settings import Settings, listed

_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)
# Ends of names that nobody can own in the public DNS (RFC 6761, RFC 6762, ICANN's .internal).
_PRIVATE = (".localhost", ".local", ".internal")
# Below it a body without a Content-Type is JSON: the network node's (Go's http.NewRequest).
_UNTYPED = "/api/"
# What OpenAI's clients send audio as.
_FORM, _AUDIO = "multipart/form-data", "/v1/audio/"
_JSON = re.compile(r"application/([\w.-]+\+)?json", re.ASCII)


class Perimeter:
    """Middleware: 421 for a foreign Host, 403 for a foreign Origin, 415 for a body not JSON,
    400 on the paths of a model's clients."""

    def __init__(self, app: ASGIApp, settings: Settings, own_names: Collection[str] = ()) -> None:
        """`own_names`: names of this node besides those of the settings."""
        self._app = app
        self._names = {name.lower() for name in own_names} | set(listed(settings.allowed_hosts))
        self._suffixes = (*_PRIVATE, *(name for name in self._names if name.startswith(".")))
        self._origins = set(listed(settings.allowed_origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http":
            _type(scope)
            refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value.decode("latin-1").strip())
        hosts, origins = headers.get(b"host", []), headers.get(b"origin", [])
        if len(hosts) > 1:
            return _answer(400, "The request has several Host headers; send one.")
        if hosts and not self.knows(hosts[0]):  # without one it is no browser's
            return _answer(
                421,
                f"This node does not answer to the name {hosts[0][:200]!r}; list it in"
                " POC_ALLOWED_HOSTS if it is its.",
            )
        for origin in origins:
            if origin.lower() not in self._origins and not (hosts and _is_of(origin, hosts[0])):
                return _answer(
                    403,
                    f"Pages of {origin[:200]!r} may not use this node; list it in"
                    " POC_ALLOWED_ORIGINS if they may.",
                )
        if not _has_body(headers):
            return None
        types = [
            value.partition(";")[0].strip().lower() for value in headers.get(b"content-type", [])
        ]
        is_audio = types == [_FORM] and _AUDIO in scope["path"]
        if is_audio and not origins:
            return None  # no page's: those that can send forms say their origin
        if len(types) != 1 or not _JSON.fullmatch(types[0]):
            # The network forwards its users' own types to a model's paths, where vLLM answers 400.
            return _answer(
                400 if is_clients_path(scope["path"]) and not is_audio else 415,
                "A body must be JSON and say so: send the header Content-Type: application/json.",
            )
        return None

    def knows(self, authority: str) -> bool:
        """True if a Host header names this node: HOST or HOST:PORT."""
        match = _AUTHORITY.fullmatch(authority)
        if match is None:
            return False
        host = match["host"].strip("[]").lower().removesuffix(".")
        if "*" in self._names or host in self._names or host.endswith(self._suffixes):
            return True
        return _is_address(host) or "." not in host


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_of(origin: str, host: str) -> bool:
    """True if a page of that origin came from the very host that it asks now."""
    scheme, separator, authority = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and authority.lower() == host.lower()


def _type(scope: Scope) -> None:
    """Calls the request JSON where it does not say what it is and no page can have sent it.

    In place: the layers outside read in this very scope whose key it has.
    """
    names = {name.lower() for name, _ in scope["headers"]}
    if scope["path"].startswith(_UNTYPED) and not names & {b"content-type", b"origin"}:
        scope["headers"] = [*scope["headers"], (b"content-type", b"application/json")]


def _has_body(headers: dict[bytes, list[str]]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", ["0"]) != ["0"]


def _answer(status: int, detail: str) -> JSONResponse:
    # The body is not read, so no other request can follow.
    return JSONResponse({"detail": detail}, status, headers={"Connection": "close"})
