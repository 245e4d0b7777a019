"""Joins this host to a node: fetches and stores its access, and sets environment variables."""

import socket
from collections.abc import MutableMapping
from pathlib import Path

from cli.join.access import Access, check_writable, read_access, redis_url_of, write_access
from cli.join.asking import Api
from cli.join.options import DEFAULT_FILE, TOKEN_VARIABLE, Join
from cli.terminal import UsageError, read_ascii
from poc_core.joining.offers import SHARED, place_of
from poc_core.joining.tokens import Token


def access_of(options: Join, env: MutableMapping[str, str]) -> Access | None:
    """Returns this host's access to its node. Joins the node first if --join or the token is new.

    Returns None if this host has not joined, or if POC_REDIS_URL is set. Raises ProoflineError.
    """
    token = token_of(options, env)
    by_hand = bool(env.get("POC_REDIS_URL"))
    if options.join is None:
        if token is not None:
            raise UsageError("A token needs --join with its API's url.")
        return None if by_hand else read_access(options.join_file)
    if by_hand:
        raise UsageError("--join brings Redis' address: leave out --redis-url and POC_REDIS_URL.")
    kept = read_access(options.join_file)
    if kept is not None and kept.api == options.join and (not token or token.id == kept.token_id):
        return kept
    if token is None:
        raise UsageError(
            "--join needs a token, by --token-file or the variable"
            f" {TOKEN_VARIABLE}; the node's operator makes one with `proofline hosts invite`."
        )
    return _join(options, token)


def token_of(options: Join, env: MutableMapping[str, str]) -> Token | None:
    """Returns the token of --token or --token-file, if any. Removes the token from `env`."""
    env.pop(TOKEN_VARIABLE, None)
    if options.token_file is None:
        return Token.read(options.token) if options.token else None
    if options.token:
        raise UsageError(
            f"--token-file and --token (or {TOKEN_VARIABLE}) exclude each other; keep one."
        )
    return Token.read(read_ascii(options.token_file, "--token-file"))


def api_of(options: Join, kept: Access | None) -> Api:
    """Returns the API of --join or, without --join, of the stored access. Raises UsageError."""
    if options.join is not None:
        ca = read_ascii(options.ca, "--ca") if options.ca is not None else None
        return Api.at(options.join, ca, options.allow_http)
    assert kept is not None
    return Api.at(kept.api, kept.api_ca, kept.allow_http)


def set_up(access: Access, file: Path, env: MutableMapping[str, str]) -> None:
    """Sets in `env` the variables with which this host's workers reach the node.

    Overwrites POC_REDIS_URL and POC_HOST_NAME; keeps other variables that are set already. `file`:
    the access file.
    """
    env["POC_REDIS_URL"] = redis_url_of(file, access)
    told = {name: value for name, value in access.settings.items() if name in SHARED}
    env["POC_HOST_NAME"] = access.name  # its user cannot write other hosts' records
    # Workers serve chat to the API on the address from which this host reaches Redis.
    if (address := address_towards(*place_of(access.redis_url))) is not None:
        told["POC_CHAT_HOST"] = address
    for name, value in told.items():
        env.setdefault(name, value)


def use_stored_access(env: MutableMapping[str, str]) -> None:
    """Sets in `env` the variables of this host's workers, if this host has joined a node."""
    access = access_of(Join(), env)
    if access is not None:
        set_up(access, DEFAULT_FILE, env)


def address_towards(host: str, port: int) -> str | None:
    """Returns the local IP address from which this host reaches `host`; None without a route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _join(options: Join, token: Token) -> Access:
    api = api_of(options, None)
    check_writable(options.join_file)
    offer = api.join(token.id).opened(token)
    access = Access(
        api=api.url,
        api_ca=api.ca,
        allow_http=options.allow_http,
        token_id=token.id,
        name=offer.name,
        redis_url=offer.url_for(token),
        redis_ca=offer.redis_ca,
        settings=offer.settings,
    )
    write_access(options.join_file, access)
    return access
