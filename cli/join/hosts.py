"""`proofline hosts`: manages the hosts that join a node."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from redis.exceptions import RedisError

from cli import options
from cli.join.inviting import Inviting, address_for_hosts
from cli.terminal import note, read_ascii
from poc_core.callbacks import redacted
from poc_core.errors import ProoflineError
from poc_core.settings import load_settings
from poc_core.state.client import connect

app = typer.Typer(no_args_is_help=True)

HostName = Annotated[str, typer.Argument(help="Name of the host, such as `gpu2`.")]


@app.command()
def invite(
    name: HostName,
    hosts_redis_url: Annotated[
        str | None,
        typer.Option(
            help="Redis' address from the host's point of view, without user and password: "
            "rediss://HOST:PORT. Default: the address in POC_REDIS_URL."
        ),
    ] = None,
    redis_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the authorities that the host trusts for rediss://. Default: the "
            "authorities of the host's system."
        ),
    ] = None,
    valid_hours: Annotated[
        float, typer.Option(min=0.01, max=720, help="Hours until the token expires.")
    ] = 24,
    redis_url: options.RedisUrl = None,
) -> None:
    """Create a host's Redis user and its token, and print the token, which is shown only once.

    On the host: `proofline workers --join URL --token-file FILE`. A token is valid for one host and
    one use. The host also gets those settings of this shell that must be equal in all processes,
    such as POC_WORKER_TTL_S.

    **Example:** proofline hosts invite gpu2 --hosts-redis-url rediss://10.0.0.1:6379
    """
    own = redacted(load_settings().redis_url) or ""
    address = address_for_hosts(hosts_redis_url or own.replace("***@", "").partition("?")[0])
    ca = read_ascii(redis_ca, "--redis-ca") if redis_ca is not None else None
    with _as_operator() as inviting:
        token, forgets = inviting.invite(name, address, ca, valid_hours * 3600, os.environ)
    if address.startswith("redis://"):
        note("hosts: nothing between this Redis and the host is encrypted; use a private network")
    if forgets:
        note(f"hosts: {forgets}")
    note(
        f"hosts: {name} may join within {valid_hours:g} hours: `proofline workers --join URL"
        " --token-file FILE`, with the API's https url. The token is shown only now:"
    )
    typer.echo(token.text)


@app.command("list")
def list_hosts(redis_url: options.RedisUrl = None) -> None:
    """Show all hosts: invited, expired or joined, and when."""
    with _as_operator() as inviting:
        seen = list(inviting.rows())
    if not seen:
        note("hosts: none was invited")
    for host in seen:
        at = datetime.fromtimestamp(host.at, UTC).strftime("%Y-%m-%d %H:%M")
        lost = "" if host.has_user else "\tRedis forgot its user: `proofline hosts restore`"
        until = "until " if host.state == "invited" else ""
        typer.echo(f"{host.name}\t{host.state.value}\t{until}{at}{lost}")


@app.command()
def revoke(name: HostName, redis_url: options.RedisUrl = None) -> None:
    """End a host's access at once: its user of Redis is removed and its connections are closed.

    When the command returns, after 6 to 12 s, no more chat is sent to the host. Its unfinished work
    goes to other hosts.
    """
    with _as_operator() as inviting:
        n_workers = inviting.revoke(name)
    note(f"hosts: {name} is revoked; the {n_workers} worker(s) it had are no longer asked")


@app.command()
def restore(redis_url: options.RedisUrl = None) -> None:
    """Create all hosts' users again: after a restart of a Redis without aclfile, or an upgrade.

    The users get the rights that workers have in this release. Users that belong to no host are
    removed.
    """
    with _as_operator() as inviting:
        n_hosts, forgets = inviting.restore()
    note(f"hosts: Redis knows {n_hosts} host(s)")
    if forgets:
        note(f"hosts: {forgets}")


@contextmanager
def _as_operator() -> Iterator[Inviting]:
    """Yields an Inviting with the operator's Redis user. Redis errors become ProoflineErrors."""
    settings = load_settings()
    try:
        with connect(settings) as redis:
            yield Inviting(redis, settings)
    except RedisError as error:
        raise ProoflineError(
            f"Redis refuses or does not answer ({error}); check POC_REDIS_URL, which must name the"
            " operator's user."
        ) from error
