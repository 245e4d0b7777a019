"""Which addresses of Redis another host may be given, and what two commands at a time do."""

from collections.abc import Callable

import fakeredis
import pytest
from typer.testing import CliRunner

from cli.join import inviting
from cli.join.inviting import Inviting, address_for_hosts
from cli.join.users import worker_rights
from cli.main import app
from cli.terminal import UsageError
from poc_core.joining.invitations import HostUser
from poc_core.settings import Settings


@pytest.mark.parametrize(
    "url",
    [
        *(f"redis://{host}:6379/0" for host in ("127.0.0.1", "localhost", "[::1]", "127.9.9.9")),
        *("redis://0.0.0.0:6379", "rediss://[::]:6379"),
    ],
)
def test_an_address_that_is_each_hosts_own_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--hosts-redis-url with the address that other hosts"):
        address_for_hosts(url)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://u:p@10.0.0.1", "redis://10.0.0.1/1", "redis://10.0.0.1?ssl_cert_reqs=none"),
        *("http://10.0.0.1", "10.0.0.1:6379", "unix:///tmp/redis"),
        *("redis://10.0.0.1:99999", "redis://[::1", "redis://node..one", "redis:///0"),
    ],
)
def test_an_address_that_says_too_much_or_too_little_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--hosts-redis-url"):
        address_for_hosts(url)


@pytest.mark.promise(
    "an operator whose Redis would forget hosts or has no password", "cannot invite hosts"
)
def test_a_redis_that_fails_over_takes_no_invited_hosts() -> None:
    with pytest.raises(UsageError, match="Redis copies no users to replicas"):
        address_for_hosts("redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/node/0")


def test_others_are_told_with_their_database() -> None:
    assert address_for_hosts("rediss://10.0.0.1:6380") == "rediss://10.0.0.1:6380/0"
    assert address_for_hosts("redis://no-such-name.invalid/") == "redis://no-such-name.invalid/0"


@pytest.mark.promise(
    "a host that joined",
    "has its own Redis user with the rights of `worker`; the API creates no Redis users",
)
def test_the_rights_are_those_of_worker() -> None:
    rights = worker_rights()
    assert rights[0] == "-@all"
    assert {"~poc:worker:*", "+evalsha", "-@dangerous"} <= set(rights)
    assert not {"on", "user", "worker", "+eval", "~*", "~poc:*"} & set(rights)


def test_redis_on_loopback_is_no_address_for_others() -> None:
    done = CliRunner().invoke(app, ["hosts", "invite", "gpu2"])  # POC_REDIS_URL's default
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 127.0.0.1 is this machine alone")


class Users:
    """The hosts' users in a Redis; fakeredis has none."""

    def __init__(self, _: object) -> None:
        self.found: set[str] = set()
        self.before_names: Callable[[], object] = lambda: None
        self.before_make: Callable[[], object] = lambda: None

    def check(self) -> None: ...

    def save(self) -> bool:
        return True

    def make(self, host: HostUser) -> None:
        before, self.before_make = self.before_make, lambda: None
        before()
        self.found.add(host.user)

    def remove(self, user: str) -> None:
        self.found.discard(user)

    def names(self) -> set[str]:
        before, self.before_names = self.before_names, lambda: None
        before()
        return set(self.found)


def test_users_are_restored_as_hosts_are_after_another_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inviting, "HostUsers", Users)
    hosts = Inviting(fakeredis.FakeRedis(), Settings())
    users: Users = hosts._users  # type: ignore[assignment]

    def invite(name: str) -> None:
        hosts.invite(name, "redis://10.0.0.1:6379/0", None, 3600, {})

    invite("gpu1")
    invite("gpu2")
    users.found = {"host-stray"}
    users.before_make = lambda: hosts.revoke("gpu2")
    users.before_names = lambda: invite("gpu3")
    hosts.restore()
    assert users.found == {"host-gpu1", "host-gpu3"}
