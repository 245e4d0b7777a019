"""The operator's side of joining: invite, list, revoke and restore hosts."""

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
from poc_core.joining import invitations, offers, tokens
from poc_core.redis_at.url import RedisUrl
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import CHAT_SENT_S, WorkerRegistry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_FORGETS = (
    "this Redis has no aclfile and forgets hosts' users with a restart; afterwards run `proofline"
    " hosts restore`"
)


class HostsError(ProoflineError):
    """No host has this name, or a new host's name is taken. The text says what to do."""


@dataclass(frozen=True)
class HostRow:
    """One line of `proofline hosts list`: the state of an invited host."""

    name: str
    state: invitations.State
    at: float  # when the host joined, or when its token expires; seconds since the epoch
    has_user: bool  # True if Redis has the host's user


class Inviting:
    """The operator's commands for a node's hosts: invite, list, revoke and restore."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        """`redis`: a client that is logged in as the operator's user."""
        self._users = HostUsers(redis)
        self._invitations = invitations.Invitations(redis)
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
    ) -> tuple[tokens.Token, str]:
        """Creates a host's Redis user and invitation. Returns the token, and a warning or "".

        The warning says that Redis loses the user at its next restart. `redis_url`: returned by
        `address_for_hosts`. `redis_ca`: certificates (PEM). `valid_s`: the token's lifetime in
        seconds. `env`: the source of the host's settings. Raises HostsError if the name is taken.
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
        token, now = tokens.Token.new(), time.time()
        settings = {key: env[key] for key in offers.SHARED if env.get(key)}
        offer = offers.Offer(
            name=name,
            user=PREFIX + name,
            salt=tokens.new_salt(),
            redis_url=redis_url,
            redis_ca=redis_ca,
            settings=settings,
        )
        host = invitations.HostUser(
            user=offer.user,
            password_sha256=tokens.hashed(token.password(offer.salt)),
            token_sha256=tokens.hashed(token.id),
            invited_at=now,
        )
        place = "{}:{}".format(*offers.place_of(redis_url))
        invitation = invitations.Invitation(name=name, expires_at=now + valid_s, redis=place)
        # The user comes first, because a user without a known password does no harm.
        self._users.make(host)
        self._invitations.add(host, invitation, offers.SealedOffer.of(offer, token))
        return token, self._forgets()

    def rows(self) -> Iterator[HostRow]:
        users = self._users.names()
        for name, host in sorted(self._invitations.hosts().items()):
            try:
                invitation = self._invitations.of_hash(host.token_sha256)
            except (invitations.UnknownTokenError, ValueError):  # an API has removed or damaged it
                yield HostRow(name, invitations.State.REVOKED, host.invited_at, host.user in users)
                continue
            at = invitation.used_at or invitation.expires_at
            yield HostRow(name, invitation.state(time.time()), at, host.user in users)

    def revoke(self, name: str) -> int:
        """Ends a host's access to the node. Returns how many workers of the host were removed.

        Returns when no chat is sent to the host any more. Raises HostsError for an unknown name,
        and UsersError if Redis cannot write its aclfile; even then the access has ended.
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
        """Removes a host's workers, and returns their number once the host gets no more chat."""
        # Removes an honest host's records by name. Then removes all silent workers, because a
        # dishonest host may have written other names. Live workers send new heartbeats.
        workers = [worker for worker in self._registry.live() if worker.host == host]
        for worker in workers:
            self._registry.remove(worker.id)
        for report in self._deployments.hosts():
            if report.host == host:
                self._deployments.leave(report.id)
        self._deployments.drop_silent()
        gone_at = time.monotonic()
        if n_silent := self._registry.drop_silent(2 * self._heartbeat_s):  # a heartbeat may be late
            gone_at = time.monotonic()
        if n_workers := len(workers) + n_silent:
            time.sleep(max(0.0, gone_at + CHAT_SENT_S - time.monotonic()))
        return n_workers

    def restore(self) -> tuple[int, str]:
        """Creates the Redis users of all hosts again, and removes users that belong to no host.

        The users get the rights that workers have in this release. Returns the number of hosts, and
        a warning or "" (see `invite`).
        """
        self._users.check()
        hosts = self._invitations.hosts().values()
        for host in hosts:
            self._users.make(host)
        # Hosts are read again, after the users: others may be invited or revoked meanwhile.
        users = self._users.names()
        for stray in users - {host.user for host in self._invitations.hosts().values()}:
            self._users.remove(stray)
        return len(hosts), self._forgets()

    def _forgets(self) -> str:
        try:
            return "" if self._users.save() else _FORGETS
        except UsersError as error:
            return str(error)


def address_for_hosts(url: str) -> str:
    """Checks the url by which hosts will reach Redis. Returns the url with database 0."""
    try:
        RedisUrl.of(url)
    except ValueError as error:
        raise UsageError(f"--hosts-redis-url {error}.") from None
    parts = urlsplit(url)
    if parts.scheme.endswith("+sentinel"):
        raise UsageError(
            "Hosts cannot be invited to a Redis that fails over: Redis copies no users to replicas,"
            " so the next primary would not know the host. Give it POC_REDIS_URL by hand."
        )
    if not parts.hostname:
        raise UsageError("--hosts-redis-url must name a host: redis://HOST:PORT/0.")
    if "@" in parts.netloc or parts.query or parts.path not in ("", "/", "/0"):
        raise UsageError(
            "--hosts-redis-url may have only scheme, host, port and database 0: each host gets its"
            " own user and password, and --redis-ca has the certificate."
        )
    if _is_this_machine(parts.hostname):
        raise UsageError(
            f"{parts.hostname} is this machine alone, so other hosts cannot reach Redis there."
            " Give --hosts-redis-url with the address that other hosts reach; Redis must listen"
            " there (docs/scale.md, Many hosts)."
        )
    return parts._replace(path="/0").geturl()


def _is_this_machine(host: str) -> bool:
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # the name may be known only in the hosts' network
        return False
    addresses = [ipaddress.ip_address(str(one).partition("%")[0]) for one in found]
    return all(address.is_loopback or address.is_unspecified for address in addresses)
