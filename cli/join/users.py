"""The users of Redis that joined hosts have, one each, with the rights of `worker`.

Only the operator makes and removes them. An API that could would be able to make itself anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from poc_core.errors import ProoflineError
from poc_core.joining.invitations import HostUser
from poc_core.state.keys import WORKER_PREFIX

PREFIX = "host-"
_RIGHTS_OF = "user worker "
# All workers' records: a host writes its own alone, whose names begin with the host's.
_RECORDS = f"~{WORKER_PREFIX}*"
_HERE = Path(__file__).resolve().parents[1]
# A checkout keeps the rights with Docker's files, a wheel inside this package (pyproject.toml).
_PLACES = (_HERE.parent / "docker" / "users.acl", _HERE / "users.acl")
_NO_FILE = "not configured to use an ACL file"
_ELSEWHERE = (
    "Give POC_REDIS_URL the operator's user (`default`, redis_password). Where nobody may make"
    " users, as in some managed Redis, make one with the provider's means, with the rights of"
    " `worker` in docker/users.acl, and start that host's workers with POC_REDIS_URL"
    " (docs/scale.md)."
)


class UsersError(ProoflineError):
    """Redis' users cannot be changed; the text says what to do."""


class HostUsers:
    """Hosts' users of one Redis."""

    def __init__(self, redis: Redis) -> None:
        """`redis`: as the operator's user."""
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable

    def check(self) -> None:
        """UsersError: this user may make none, or nobody needs one to be let in."""
        with _told():
            default = self._redis.acl_getuser("default") or {}
        if {"on", "nopass"} <= set(default.get("flags", ())):
            raise UsersError(
                "This Redis lets everybody in without a password, so no host could ever be shut"
                " out: give it users or a password first (docs/redis.md, Users)."
            )

    def names(self) -> set[str]:
        """The hosts' users that there are."""
        with _told():
            users = self._redis.execute_command("ACL", "USERS")  # redis-py's own differs by release
        return {raw.decode() for raw in users if raw.startswith(PREFIX.encode())}

    def make(self, host: HostUser) -> None:
        """Makes a host's user, or gives it its rights anew."""
        with _told():
            version = str(self._redis.info("server")["redis_version"])
            rights = worker_rights()
            if int(version.partition(".")[0]) >= 7:  # which knows keys that may only be read
                at, name = rights.index(_RECORDS), host.user.removeprefix(PREFIX)
                rights[at : at + 1] = f"%R{_RECORDS}", f"~{WORKER_PREFIX}{name}/*"
            words = ("reset", "on", f"#{host.password_sha256}", *rights)
            self._redis.execute_command("ACL", "SETUSER", host.user, *words)

    def remove(self, user: str) -> None:
        """Removes a user and closes its connections; none of its commands runs from now on."""
        with _told():
            self._redis.acl_deluser(user)

    def save(self) -> bool:
        """Writes Redis' aclfile; False: it has none, and forgets hosts' users with a restart.

        UsersError: it has one that it cannot write.
        """
        try:
            with _told():
                self._redis.acl_save()
        except ResponseError as error:
            if _NO_FILE in str(error):
                return False
            raise UsersError(
                f"Redis cannot write its aclfile ({error}), and has the users of before after its"
                " restart: let it write there, then run `proofline hosts restore`."
            ) from None
        return True


@contextmanager
def _told() -> Iterator[None]:
    """Says what to do where Redis makes no users for us."""
    try:
        yield
    except NoPermissionError as error:
        raise UsersError(f"This user of Redis may make no users ({error}). {_ELSEWHERE}") from None
    except ResponseError as error:
        if "unknown command" not in str(error).lower():
            raise
        raise UsersError(f"This Redis has no users ({error}). {_ELSEWHERE}") from None


def worker_rights() -> list[str]:
    """The words of docker/users.acl that give a worker its rights."""
    file = next(place for place in _PLACES if place.is_file())
    lines = file.read_text(encoding="utf-8").splitlines()
    return [
        word
        for line in lines
        if line.startswith(_RIGHTS_OF)
        for word in line.removeprefix(_RIGHTS_OF).split()
    ]
