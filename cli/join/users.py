"""The Redis users of joined hosts. Only the operator may create them, not the API."""

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
# The records of all workers. A host may only write records whose names begin with the host's name.
_RECORDS = f"~{WORKER_PREFIX}*"
_HERE = Path(__file__).resolve().parents[1]
# The file is among Docker's files in a checkout, and in this package in a wheel (pyproject.toml).
_PLACES = (_HERE.parent / "docker" / "users.acl", _HERE / "users.acl")
_NO_FILE = "not configured to use an ACL file"
_ELSEWHERE = (
    "Give POC_REDIS_URL the operator's user (`default`, redis_password). Where nobody may make"
    " users, as in some managed Redis, make one with the provider's means, with the rights of"
    " `worker` in docker/users.acl, and start that host's workers with POC_REDIS_URL"
    " (docs/scale.md)."
)


class UsersError(ProoflineError):
    """The Redis users of hosts cannot be created, removed or saved. The text says what to do."""


class HostUsers:
    def __init__(self, redis: Redis) -> None:
        """`redis`: a client that is logged in as the operator's user."""
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable

    def check(self) -> None:
        """Raises UsersError if users cannot be created, or if Redis needs no password."""
        with _with_advice():
            default = self._redis.acl_getuser("default") or {}
        if {"on", "nopass"} <= set(default.get("flags", ())):
            raise UsersError(
                "This Redis lets everybody in without a password, so a host could not be revoked:"
                " give Redis users or a password first (docs/redis.md, Users)."
            )

    def names(self) -> set[str]:
        with _with_advice():
            users = self._redis.execute_command("ACL", "USERS")  # redis-py's own differs by release
        return {raw.decode() for raw in users if raw.startswith(PREFIX.encode())}

    def make(self, host: HostUser) -> None:
        """Creates a host's user. If the user exists, sets its password and rights again."""
        with _with_advice():
            version = str(self._redis.info("server")["redis_version"])
            rights = worker_rights()
            if int(version.partition(".")[0]) >= 7:  # Redis 7 supports read-only keys
                at, name = rights.index(_RECORDS), host.user.removeprefix(PREFIX)
                rights[at : at + 1] = f"%R{_RECORDS}", f"~{WORKER_PREFIX}{name}/*"
            words = ("reset", "on", f"#{host.password_sha256}", *rights)
            self._redis.execute_command("ACL", "SETUSER", host.user, *words)

    def remove(self, user: str) -> None:
        """Removes a user and closes its connections."""
        with _with_advice():
            self._redis.acl_deluser(user)

    def save(self) -> bool:
        """Makes Redis save its users. Returns False if Redis has no aclfile. Raises UsersError."""
        try:
            with _with_advice():
                self._redis.acl_save()
        except ResponseError as error:
            if _NO_FILE in str(error):
                return False
            raise UsersError(
                f"Redis cannot write its aclfile ({error}), and loses this change at its next"
                " restart: make the file writable, then run `proofline hosts restore`."
            ) from None
        return True


@contextmanager
def _with_advice() -> Iterator[None]:
    """Turns Redis' refusal to change users into a UsersError with advice, inside the context."""
    try:
        yield
    except NoPermissionError as error:
        raise UsersError(f"This user of Redis may make no users ({error}). {_ELSEWHERE}") from None
    except ResponseError as error:
        if "unknown command" not in str(error).lower():
            raise
        raise UsersError(f"This Redis has no users ({error}). {_ELSEWHERE}") from None


def worker_rights() -> list[str]:
    file = next(place for place in _PLACES if place.is_file())
    lines = file.read_text(encoding="utf-8").splitlines()
    return [
        word
        for line in lines
        if line.startswith(_RIGHTS_OF)
        for word in line.removeprefix(_RIGHTS_OF).split()
    ]
