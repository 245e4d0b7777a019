"""Admits requests by the role of their key or by the peer's network, and limits each client's rate.

The required role depends on the route that matches, not on a prefix of the path.
"""

import time
from collections.abc import Callable, Collection

from cachetools import LRUCache
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from api.edge.keys import Caller, KeyFile, Role
from api.edge.private_peers import Address, address_of, forwarded_for, is_private
from api.edge.refusals import CALLER
from api.edge.shares import CLIENT, of_address
from api.errors import openai_error
from poc_core.serving.openai_paths import ELSEWHERE, FOLDERS
from poc_core.settings import PRIVATE, Settings, listed, parse_networks

# Role that a route needs, by path. Other routes need `read` for GET and `deploy` otherwise.
_PROOFS = ("generate", "generate/{request_id}", "init/generate", "stop")
_PHASES = ("validate", "init", "init/validate", "phase/generate", "phase/validate")
_CHAT = ("chat/completions", "completions", "responses", "embeddings")
_MODELS = ("models", "models/{model:path}")
ROLES: dict[str, Role] = {
    **{f"/api/v1/pow/{path}": Role.PROOFS for path in (*_PROOFS, *_PHASES)},
    **{f"/api/v1/inference/pow/{path}": Role.PROOFS for path in _PROOFS},
    **{f"/v1/{path}": Role.CHAT for path in (*_CHAT, *_MODELS)},
    **{f"{folder}{{path:path}}": Role.CHAT for folder in FOLDERS},
    "/api/v1/models/status": Role.READ,
    **dict.fromkeys(ELSEWHERE, Role.CHAT),
}
# Paths open to all: the liveness probe, the clock (only the time), and the console's page, which
# asks for a key itself and contains no data of the node.
OPEN = {"/livez", "/api/v1/clock", "/console", "/console/", "/console/{name:path}"}
# Paths for hosts that join, with a token instead of a key; api/routes/hosts.py checks the token.
OF_HOSTS = {"/api/v1/hosts/join", "/api/v1/hosts/standing"}

# Headers that may contain a key: the standard one, Anthropic's and Azure's.
_BEARER = b"authorization"
_KEY_HEADERS = {_BEARER, b"x-api-key", b"api-key"}
# Largest burst of a client, in seconds of its allowed rate.
_BURST_S = 10.0
# Most clients whose rate is tracked.
_MAX_CLIENTS = 10_000
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def role_of(path: str | None, method: str) -> Role:
    """Returns the role that a request's key needs. `path`: a route's template, or None."""
    role = ROLES.get(path or "")
    if role is Role.PROOFS and method in ("GET", "HEAD"):
        return Role.READ
    return role or (Role.READ if method in ("GET", "HEAD", "OPTIONS") else Role.DEPLOY)


def keys_wanted(settings: Settings, listens_on: str) -> bool:
    """Returns True if clients need a key (POC_REQUIRE_KEYS). `listens_on`: the server's address."""
    if settings.require_keys == "auto":
        return listens_on not in _LOOPBACK and not listens_on.startswith("127.")
    return settings.require_keys == "always"


def salts_wanted(settings: Settings, listens_on: str) -> bool:
    """Returns True if clients must not share blocks of the prefix cache (POC_CACHE_SALT)."""
    if settings.cache_salt == "auto":
        return keys_wanted(settings, listens_on)
    return settings.cache_salt == "always"


class Doorkeeper:
    """Middleware that checks a request's key (401), role (403) and client's rate (429)."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        wants_keys: bool,
        routes: list[BaseRoute],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._routes = routes
        self._wants_keys = wants_keys
        self._keys = KeyFile(
            settings.api_keys_file,
            settings.api_key.get_secret_value() if settings.api_key is not None else None,
        )
        self._trusted = parse_networks(settings.trusted_networks)
        self._trusts_private = PRIVATE in listed(settings.trusted_networks)
        self._rates = (
            Rates(settings.max_requests_per_s, clock) if settings.max_requests_per_s else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] == "http" and (self._wants_keys or self._rates):
            answer, scope = self._admit(scope)
        await answer(scope, receive, send)

    def _admit(self, scope: Scope) -> tuple[ASGIApp, Scope]:
        """Returns the ASGI app that answers (the inner app or an error), and the app's scope."""
        path = self._route(scope)
        if path in OPEN | OF_HOSTS:
            return self._app, scope
        peer = scope["client"][0] if scope.get("client") else ""
        who = of_address(peer)
        if self._wants_keys:
            given = {header for header in scope["headers"] if header[0] in _KEY_HEADERS}
            if not self._is_trusted(peer, scope):
                caller = self._caller(given)
                refusal = self._refusal(caller, role_of(path, scope["method"]), bool(given))
                if refusal is not None:
                    return refusal, scope
                assert caller is not None
                scope[CALLER] = caller.name
                who = f"key {caller.name}"
                scope = {**scope, CLIENT: who}
            # No key may reach anything behind this layer, such as a worker on another host.
            kept = [header for header in scope["headers"] if header not in given]
            scope = {**scope, "headers": kept}
        wait_s = self._rates.take(who) if self._rates else 0.0
        if wait_s > 0:
            detail = (
                "You send more requests per second than one client may (POC_MAX_REQUESTS_PER_S);"
                " wait a little."
            )
            headers = {"Retry-After": str(int(wait_s) + 1), "Connection": "close"}
            return JSONResponse({"detail": detail}, 429, headers), scope
        return self._app, scope

    def _route(self, scope: Scope) -> str | None:
        partial: str | None = None
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return getattr(route, "path", None)
            # another method of the path: the app answers 405
            if match is Match.PARTIAL and partial is None:
                partial = getattr(route, "path", None)
        return partial

    def _is_trusted(self, peer: str, scope: Scope) -> bool:
        address = address_of(peer)  # None: a Unix socket of this machine
        if address is not None and self._is_listed(address):
            return True
        return self._trusts_private and all(
            one is not None and (self._is_listed(one) or is_private(one))
            for one in (address, *forwarded_for(scope["headers"]))
        )

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)

    def _caller(self, given: Collection[tuple[bytes, bytes]]) -> Caller | None:
        """Returns the caller of the key in `given`; None for an unknown key or several keys."""
        keys = {_key(name, value.decode("utf-8", "surrogateescape")) for name, value in given}
        return self._keys.caller(keys.pop()) if len(keys) == 1 else None

    @staticmethod
    def _refusal(caller: Caller | None, role: Role, gave_one: bool) -> JSONResponse | None:
        if caller is not None and caller.may(role):
            return None
        if caller is None:
            status, kind = 401, "invalid_api_key"
            detail = (
                "The key is wrong: the node does not know this key, or two headers hold two keys;"
                " the node's operator makes another key with `proofline key new`."
                if gave_one
                else "This needs a key: send the header Authorization: Bearer KEY; the node's"
                " operator makes one with `proofline key new`."
            )
        else:
            status, kind = 403, "insufficient_permissions"
            detail = (
                f"The key {caller.name} lacks the role {role.value}; the node's operator can make a"
                " key that has this role."
            )
        answer = (
            openai_error(status, detail, kind)
            if role is Role.CHAT
            else JSONResponse({"detail": detail}, status)
        )
        answer.headers["Connection"] = "close"
        if status == 401:
            answer.headers["WWW-Authenticate"] = "Bearer"
        return answer


def _key(name: bytes, value: str) -> str:
    scheme, _, key = value.partition(" ") if name == _BEARER else ("bearer", "", value)
    return key.strip() if scheme.lower() == "bearer" else ""


class Rates:
    """A token bucket for each client, refilled at `per_second`. Each request takes one token."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst_s = max(_BURST_S, 1 / per_second)
        self._clock = clock
        # client -> when its bucket is full again
        self._full_at: LRUCache[str, float] = LRUCache(_MAX_CLIENTS)

    def take(self, client: str) -> float:
        """Takes a token and returns 0. If the bucket is empty, returns the seconds to wait."""
        now = self._clock()
        full_at = max(now, self._full_at.get(client, now)) + 1 / self._per_second
        if full_at - now > self._burst_s:
            return full_at - now - self._burst_s
        self._full_at[client] = full_at
        return 0.0
