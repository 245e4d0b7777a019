"""Admits a request, up to a rate, by its key's role or its peer's network where keys are wanted.

A route says what its path needs, so that no prefix of the path matters.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection

from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from api.edge.keys import Caller, KeyFile, Role
from api.edge.private_peers import Address, address_of, forwarded_for, is_private
from api.edge.shares import CLIENT
from api.errors import openai_error
from api.seen.refusals import CALLER
from poc_core.serving.openai_paths import ELSEWHERE, FOLDERS
from poc_core.settings import PRIVATE, Settings, listed, parse_networks

# Role that a route needs, by path; others need `read` for GET, `deploy` for anything else.
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
# Open to all: what a restarter of a hung process asks, the clock, which tells just the time, and
# the console's page, which asks for a key itself and holds nothing of the node.
OPEN = {"/livez", "/api/v1/clock", "/console", "/console/", "/console/{name:path}"}
# What a host asks that has a token in place of a key: api/routes/hosts.py looks at it.
OF_HOSTS = {"/api/v1/hosts/join", "/api/v1/hosts/standing"}

# Headers that hold a key: everybody's, Anthropic's clients' and Azure's.
_BEARER = b"authorization"
_KEY_HEADERS = {_BEARER, b"x-api-key", b"api-key"}
# Seconds' worth of requests that a client may send at once.
_BURST_S = 10.0
# Clients whose rate is remembered.
_MAX_CLIENTS = 10_000
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def role_of(path: str | None, method: str) -> Role:
    """The role that a key needs for a route; None: the path has no route."""
    role = ROLES.get(path or "")
    if role is Role.PROOFS and method in ("GET", "HEAD"):
        return Role.READ
    return role or (Role.READ if method in ("GET", "HEAD", "OPTIONS") else Role.DEPLOY)


def keys_wanted(settings: Settings, listens_on: str) -> bool:
    """True if an API that listens on that address wants keys."""
    if settings.require_keys == "auto":
        return listens_on not in _LOOPBACK and not listens_on.startswith("127.")
    return settings.require_keys == "always"


def salts_wanted(settings: Settings, listens_on: str) -> bool:
    """True if each client's chats have a prefix cache of their own."""
    if settings.cache_salt == "auto":
        return keys_wanted(settings, listens_on)
    return settings.cache_salt == "always"


class Doorkeeper:
    """Middleware: 401 without a known key, 403 for one without the role, 429 beyond the rate."""

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
        """The app that answers the request, and the scope that it gets to see."""
        path = self._route(scope)
        if path in OPEN | OF_HOSTS:
            return self._app, scope
        peer = scope["client"][0] if scope.get("client") else ""
        who = peer
        if self._wants_keys and not self._is_trusted(peer, scope):
            given = {header for header in scope["headers"] if header[0] in _KEY_HEADERS}
            caller = self._caller(given)
            refusal = self._refusal(caller, role_of(path, scope["method"]), bool(given))
            if refusal is not None:
                return refusal, scope
            assert caller is not None
            scope[CALLER] = caller.name
            who = f"key {caller.name}"
            # This node's key is for nobody else to see, not for a worker either.
            scope = {
                **scope,
                CLIENT: who,
                "headers": [header for header in scope["headers"] if header not in given],
            }
        wait_s = self._rates.take(who) if self._rates else 0.0
        if wait_s > 0:
            detail = (
                "You send more requests than the node answers one client (POC_MAX_REQUESTS_PER_S);"
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
            if match is Match.PARTIAL and partial is None:  # of another method: it will get its 405
                partial = getattr(route, "path", None)
        return partial

    def _is_trusted(self, peer: str, scope: Scope) -> bool:
        address = address_of(peer)  # None: a socket of this machine
        if address is not None and self._is_listed(address):
            return True
        return self._trusts_private and all(
            one is not None and (self._is_listed(one) or is_private(one))
            for one in (address, *forwarded_for(scope["headers"]))
        )

    def _is_listed(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)

    def _caller(self, given: Collection[tuple[bytes, bytes]]) -> Caller | None:
        """Returns the caller whose key is in these headers; None if two headers differ."""
        keys = {_key(name, value.decode("latin-1")) for name, value in given}
        return self._keys.caller(keys.pop()) if len(keys) == 1 else None

    @staticmethod
    def _refusal(caller: Caller | None, role: Role, gave_one: bool) -> JSONResponse | None:
        if caller is not None and caller.may(role):
            return None
        if caller is None:
            status, kind = 401, "invalid_api_key"
            detail = (
                "The key is wrong: the node knows none like that, or no longer, or two headers hold"
                " two keys; its operator makes another with `proofline key new`."
                if gave_one
                else "This needs a key: send the header Authorization: Bearer KEY; the node's"
                " operator makes one with `proofline key new`."
            )
        else:
            status, kind = 403, "insufficient_permissions"
            detail = (
                f"The key {caller.name} has not the role {role.value}; the node's operator can make"
                " one that has."
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
    """A bucket for each client, filled by `per_second` and emptied by the client's requests."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst_s = max(_BURST_S, 1 / per_second)
        self._clock = clock
        # client -> when its bucket is full again
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def take(self, client: str) -> float:
        """0: the request may pass; else the seconds until one may."""
        now = self._clock()
        full_at = max(now, self._full_at.get(client, now)) + 1 / self._per_second
        if full_at - now > self._burst_s:
            return full_at - now - self._burst_s
        self._full_at[client] = full_at
        self._full_at.move_to_end(client)
        if len(self._full_at) > _MAX_CLIENTS:
            self._full_at.popitem(last=False)
        return 0.0
