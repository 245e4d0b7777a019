"""The operator's side of joining: invites, lists, revokes and restores hosts."""

import ipaddress
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from redis import Redis

from cli.join.users import PREFIX, HostUsers, UsersError
from cli.terminal import UsageError
from poc_core.errors import ProoflineError
from poc_core.joining.invitations import (
    HostUser,
    Invitation,
    Invitations,
    State,
    UnknownTokenError,
)
from poc_core.joining.offers import SHARED, Offer, SealedOffer, place_of
from poc_core.joining.tokens import Token, hashed, new_salt
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import CHAT_SENT_S, WorkerRegistry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_FORGETS = (
    "this Redis has no aclfile and forgets hosts' users with a restart; afterwards run `proofline"
    " hosts restore`"
)


class HostsError(ProoflineError):
    """No such host, or one too many; the text says what to do."""


@dataclass(frozen=True)
class Seen:
    """A host as `hosts list` shows it."""

    name: str
    state: State
    at: float  # when it joined, or until when it may; seconds since the epoch
    has_user: bool  # Redis knows its user


class Inviting:
    """A node's hosts, as its operator."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        """`redis`: as the operator's user."""
        self._users = HostUsers(redis)
        self._invitations = Invitations(redis)
        self._registry = WorkerRegistry(redis, settings)
        self._deployments = DeploymentStore(redis, settings)
        self._heartbeat_s = settings.heartbeat_s

    def invite(
        self,
        name: str,
        redis_url: str,
        redis_ca: str | None,
        valid_s: float,
        env: Mapping[str, str],
    ) -> tuple[Token, str]:
        """A token for a new host, and why Redis forgets its user with a restart ("": it does not).

        `redis_url`: as `address_for_hosts` returned it. HostsError: the name is taken.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                "A host's name has 1 to 48 letters, digits and . _ - , and begins with none of"
                " these three."
            )
        self._users.check()
        if name in self._invitations.hosts():
            raise HostsError(
                f"There is a host named {name}; revoke it first, or choose another name."
            )
        token, now = Token.new(), time.time()
        settings = {key: env[key] for key in SHARED if env.get(key)}
        offer = Offer(
            name=name,
            user=PREFIX + name,
            salt=new_salt(),
            redis_url=redis_url,
            redis_ca=redis_ca,
            settings=settings,
        )
        host = HostUser(
            user=offer.user,
            password_sha256=hashed(token.password(offer.salt)),
            token_sha256=hashed(token.id),
            invited_at=now,
        )
        place = "{}:{}".format(*place_of(redis_url))
        invitation = Invitation(name=name, expires_at=now + valid_s, redis=place)
        # In this order: a user whose password nobody knows does no harm.
        self._users.make(host)
        self._invitations.add(host, invitation, SealedOffer.of(offer, token))
        return token, self._forgets()

    def seen(self) -> Iterator[Seen]:
        """All hosts, by name."""
        users = self._users.names()
        for name, host in sorted(self._invitations.hosts().items()):
            try:
                invitation = self._invitations.of_hash(host.token_sha256)
            except (UnknownTokenError, ValueError):  # an API has removed or spoilt it
                yield Seen(name, State.REVOKED, host.invited_at, host.user in users)
                continue
            at = invitation.used_at or invitation.expires_at
            yield Seen(name, invitation.state(time.time()), at, host.user in users)

    def revoke(self, name: str) -> int:
        """Ends a host's access; returns how many workers it had. HostsError: no such host.

        When it returns no chat goes to the host, nor to what it left under other names. UsersError
        at the end: it is shut out, but Redis' file has it still.
        """
        hosts = self._invitations.hosts()
        if name not in hosts:
            names = ", ".join(sorted(hosts)) or "none"
            raise HostsError(f"No host is named {name}; there are: {names}.")
        self._users.remove(hosts[name].user)
        self._invitations.revoke(name, hosts[name])
        try:
            self._users.save()
        finally:
            n_workers = self._drop_workers(name)
        return n_workers

    def _drop_workers(self, host: str) -> int:
        """Drops what a host left in Redis; returns how many workers that was."""
        # Of an honest host, at once. Another may have written any name: those that live beat again.
        workers = [worker for worker in self._registry.live() if worker.host == host]
        for worker in workers:
            self._registry.remove(worker.id)
        for report in self._deployments.hosts():
            if report.host == host:
                self._deployments.leave(report.id)
        self._deployments.drop_silent()
        gone_at = time.monotonic()
        if n_silent := self._registry.drop_silent(2 * self._heartbeat_s):  # one may be late
            gone_at = time.monotonic()
        if n_workers := len(workers) + n_silent:
            time.sleep(max(0.0, gone_at + CHAT_SENT_S - time.monotonic()))
        return n_workers

    def restore(self) -> tuple[int, str]:
        """Makes the users of all hosts, with today's rights, and removes those of no host.

        Returns how many, and why Redis forgets them with a restart ("": it does not).
        """
        self._users.check()
        hosts = self._invitations.hosts().values()
        for stray in self._users.names() - {host.user for host in hosts}:
            self._users.remove(stray)
        for host in hosts:
            self._users.make(host)
        return len(hosts), self._forgets()

    def _forgets(self) -> str:
        try:
            return "" if self._users.save() else _FORGETS
        except UsersError as error:
            return str(error)


def address_for_hosts(url: str) -> str:
    """The url of Redis as another host may use it, without user and password.

    UsageError: it leads nowhere from another host, or says too much.
    """
    parts = urlsplit(url)
    if parts.scheme.endswith("+sentinel"):
        raise UsageError(
            "Hosts cannot be invited to a Redis that fails over: Redis copies no users to replicas,"
            " so the next primary would not know the host. Give it POC_REDIS_URL by hand."
        )
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise UsageError(
            "--hosts-redis-url must look like redis://HOST:PORT/0 (or rediss:// for TLS)."
        )
    if "@" in parts.netloc or parts.query or parts.path not in ("", "/", "/0"):
        raise UsageError(
            "--hosts-redis-url names scheme, host, port and database 0 alone: each host gets a user"
            " and a password of its own, and --redis-ca has the certificate."
        )
    if _is_this_machine(parts.hostname):
        raise UsageError(
            f"{parts.hostname} is this machine alone: no other host reaches Redis by it. Say"
            " --hosts-redis-url with the address that other hosts reach, on which Redis must listen"
            " too (docs/scale.md, Many hosts)."
        )
    return parts._replace(path="/0").geturl()


def _is_this_machine(host: str) -> bool:
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # a name that only the hosts' network knows
        return False
    addresses = [ipaddress.ip_address(str(one).partition("%")[0]) for one in found]
    return all(address.is_loopback or address.is_unspecified for address in addresses)
