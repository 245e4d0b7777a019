"""Blocks requests that the operator's browser sends to this node for foreign web pages.

A page can send any POST with a simple content type and the page's Origin (CSRF), or use a host name
that resolves to this node's address (DNS rebinding). The network node sends JSON without an Origin,
and mostly without a Content-Type.
"""

import re
from collections.abc import Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from api.edge.private_peers import address_of
from poc_core.serving.openai_paths import is_clients_path
from poc_core.settings import Settings, listed

_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)
# Suffixes that public DNS does not register (RFC 6761, RFC 6762, ICANN's .internal).
_PRIVATE = (".localhost", ".local", ".internal")
# Here a body without a Content-Type is JSON: the network node (Go) omits the header.
_UNTYPED = "/api/"
# Content type and path of audio from OpenAI's clients.
_FORM, _AUDIO = "multipart/form-data", "/v1/audio/"
_JSON = re.compile(r"application/([\w.-]+\+)?json", re.ASCII)


class Perimeter:
    """Middleware that refuses foreign Host (421) and Origin headers (403), and non-JSON bodies.

    A non-JSON body gets 400 on OpenAI's and Anthropic's paths, 415 on all other paths.
    """

    def __init__(self, app: ASGIApp, settings: Settings, own_names: Collection[str] = ()) -> None:
        """`own_names`: names and addresses of this node, in addition to POC_ALLOWED_HOSTS."""
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
        if hosts and not self.knows(hosts[0]):  # a browser always sends a Host
            match = _AUTHORITY.fullmatch(hosts[0])
            name = match["host"] if match else hosts[0]  # without a port, as the setting has names
            return _answer(
                421,
                f"This node does not answer to the name {name[:200]!r}; if this is a"
                " name of the node, list it in POC_ALLOWED_HOSTS.",
            )
        for origin in origins:
            if origin.lower() not in self._origins and not (hosts and _is_of(origin, hosts[0])):
                return _answer(
                    403,
                    f"Pages of {origin[:200]!r} may not use this node; list it in"
                    " POC_ALLOWED_ORIGINS if they may.",
                )
        has_length = headers.get(b"content-length", ["0"]) != ["0"]
        if not has_length and b"transfer-encoding" not in headers:  # no body
            return None
        types = [
            value.partition(";")[0].strip().lower() for value in headers.get(b"content-type", [])
        ]
        is_audio = types == [_FORM] and _AUDIO in scope["path"]
        if is_audio and not origins:
            return None  # not from a web page: browsers send an Origin with a form
        if len(types) != 1 or not _JSON.fullmatch(types[0]):
            # The network forwards users' requests to clients' paths; vLLM would answer 400.
            return _answer(
                400 if is_clients_path(scope["path"]) and not is_audio else 415,
                "The body must be JSON, with the header Content-Type: application/json.",
            )
        return None

    def knows(self, authority: str) -> bool:
        """Returns True if this node accepts a Host header with this value (HOST or HOST:PORT)."""
        match = _AUTHORITY.fullmatch(authority)
        if match is None:
            return False
        host = match["host"].strip("[]").lower().removesuffix(".")
        if "*" in self._names or host in self._names or host.endswith(self._suffixes):
            return True
        return address_of(host) is not None or "." not in host


def _is_of(origin: str, host: str) -> bool:
    scheme, separator, authority = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and authority.lower() == host.lower()


def _type(scope: Scope) -> None:
    """Adds Content-Type: application/json to a request below /api/ without Content-Type and Origin.

    A request with an Origin stays unchanged, because a web page can have sent it. Changes the scope
    in place, because outer middleware reads data that inner middleware adds to this scope.
    """
    names = {name.lower() for name, _ in scope["headers"]}
    if scope["path"].startswith(_UNTYPED) and not names & {b"content-type", b"origin"}:
        scope["headers"] = [*scope["headers"], (b"content-type", b"application/json")]


def _answer(status: int, detail: str) -> JSONResponse:
    # The body is not read, so no other request can follow on this connection.
    return JSONResponse({"detail": detail}, status, headers={"Connection": "close"})
