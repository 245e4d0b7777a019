"""Checks for a host that joins or has joined a node: API, token, and connection to Redis."""

import os
import socket
from collections.abc import Generator, Iterator

from cli.examine.findings import Check, Finding, Subject
from cli.examine.redis import clock_finding, server
from cli.join import asking, joining
from cli.join.access import Access, read_access
from cli.join.options import Join
from cli.terminal import UsageError
from poc_core.answers import HostStanding
from poc_core.errors import ProoflineError
from poc_core.joining.offers import place_of
from poc_core.settings import REDIS_TIMEOUT_S, load_settings

_JOINING, _TOKEN, _API, _REDIS = map(Subject, ("joining", "token", "api", "redis"))

_ANEW = "Ask the operator for another token: `proofline hosts revoke`, then `hosts invite`."


def checks(options: Join) -> list[Check]:
    """Returns the checks for a host that has joined a node or is about to join; [] otherwise.

    If the host has joined, also sets the environment with which its workers reach the node.
    """
    try:
        token = joining.token_of(options, os.environ)
        by_hand = bool(os.environ.get("POC_REDIS_URL"))
        if by_hand and options.join is not None:
            raise UsageError("--join brings Redis' address: leave out POC_REDIS_URL.")
        kept = None if by_hand else read_access(options.join_file)
        if kept is not None and options.join not in (None, kept.api):
            kept = None
        if kept is None and options.join is None:
            return []
        api = joining.api_of(options, kept)
        if kept is not None and (token is None or token.id == kept.token_id):
            joining.set_up(kept, options.join_file, os.environ)
            return [("joining", lambda: _joined(api, kept))]
        if token is None:
            raise UsageError("This host has not joined yet: name the token too, by --token-file.")
    except ProoflineError as error:
        wrong = _JOINING.problem(str(error))
        return [("joining", lambda: [wrong])]
    return [("joining", lambda: _about_to_join(api, token.id))]


def _about_to_join(api: asking.Api, token_id: str) -> Iterator[Finding]:
    standing = yield from _standing(api, token_id)
    if standing is None:
        return
    if standing.state == "invited":
        yield _TOKEN.ok(f"is good for one host, {standing.name}")
        host, _, port = standing.redis.rpartition(":")
        yield _reach(host, int(port))
    else:
        was = {"joined": "was used already", "expired": "has expired", "revoked": "is revoked"}
        yield _TOKEN.problem(f"The token of {standing.name} {was[standing.state]}.", _ANEW)


def _joined(api: asking.Api, kept: Access) -> Iterator[Finding]:
    standing = yield from _standing(api, kept.token_id)
    if standing is not None and standing.state == "revoked":
        yield _TOKEN.problem(f"This host, {kept.name}, is revoked.", _ANEW)
    elif standing is not None:
        yield _TOKEN.ok(f"this host has joined as {kept.name}")
    reach = _reach(*place_of(kept.redis_url))
    yield reach
    if reach.level == "ok":
        yield from server(load_settings())


def _standing(api: asking.Api, token_id: str) -> Generator[Finding, None, HostStanding | None]:
    """Yields findings about API, clock and token. Returns the token's state; None if unknown."""
    try:
        skew_s = api.skew_s()
        trust = "its very certificate" if api.pin else "a trusted certificate" if api.is_tls else ""
        yield _API.ok(f"answers at {api.host}:{api.port}, with {trust or 'no TLS'}")
        yield clock_finding("the API's", skew_s)
        return api.standing(token_id)
    except asking.CertificateError as error:
        yield _API.problem(str(error))
    except asking.ApiAwayError as error:
        yield _API.problem(f"{error}.", "Correct the url; let this host through to that port.")
    except asking.RefusedError as error:
        if error.status == 401:
            yield _TOKEN.problem(str(error), _ANEW)
        else:
            yield _API.problem(str(error))
    return None


def _reach(host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), timeout=REDIS_TIMEOUT_S).close()
    except OSError as error:
        return _REDIS.problem(
            f"{host}:{port}, which the operator gave as Redis' address, is not reachable from here"
            f" ({error}).",
            "Open that port to this host; or have it invited again with the address that leads"
            " there (--hosts-redis-url).",
        )
    return _REDIS.ok(f"{host}:{port} is reachable from here")
