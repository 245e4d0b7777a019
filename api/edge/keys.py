"""The API's keys. They are stored in a file as names, roles and SHA-256 hashes.

A key has 256 random bits, so it can be found neither by guessing nor from its unsalted hash.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from poc_core.errors import ProoflineError

log = logging.getLogger(__name__)

# Prefix of all keys, so that secret scanners find a published key.
PREFIX = "proofline_"
_RANDOM_BYTES = 32


class Role(StrEnum):
    """A permission of a key. Each role except `chat` includes `read-only`."""

    READ = "read-only"
    PROOFS = "proofs"
    CHAT = "chat"
    DEPLOY = "deploy"


# Roles that the network node needs when a key is its auth_token.
OF_NETWORK_NODE = frozenset({Role.PROOFS, Role.CHAT, Role.DEPLOY})


class KeysError(ProoflineError):
    """The key file cannot be read or changed. The text says what to do."""


class StoredKey(BaseModel, frozen=True):
    name: str = Field(pattern=r"^[\w.@-]{1,64}$")
    roles: frozenset[Role]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created_at: float  # seconds since the epoch


class _File(BaseModel):
    keys: list[StoredKey] = []


@dataclass(frozen=True)
class Caller:
    """Name and roles of the key that a request was sent with."""

    name: str
    roles: frozenset[Role]

    def may(self, role: Role) -> bool:
        return role in self.roles or (role is Role.READ and bool(self.roles - {Role.CHAT}))


class KeyFile:
    """The keys in one file. The file is read again whenever it has changed."""

    def __init__(self, path: Path, beside: str | None = None) -> None:
        """`beside`: an additional key with all roles, which is not in the file (POC_API_KEY)."""
        self.path = path.expanduser()
        self._beside = (
            {} if beside is None else {_hash(beside): Caller("POC_API_KEY", frozenset(Role))}
        )
        self._seen: tuple[int, ...] | None = None
        self._callers: Mapping[str, Caller] = self._beside

    def caller(self, key: str) -> Caller | None:
        """Returns the name and roles of a key; None if unknown. Compares only hashes of keys."""
        self._reload()
        return self._callers.get(_hash(key))

    def keys(self) -> Sequence[StoredKey]:
        """Reads the file and returns its keys. KeysError if the file cannot be read."""
        try:
            return _File.model_validate_json(self.path.read_bytes()).keys
        except FileNotFoundError:
            return []
        except OSError as error:
            raise KeysError(f"The keys in {self.path} cannot be read ({error.strerror}).") from None
        except ValidationError:
            raise KeysError(
                f"{self.path} is not a file of `proofline key`; fix or remove it."
            ) from None

    def add(self, name: str, roles: Collection[Role]) -> str:
        """Creates a key, stores its hash, and returns the key. Raises KeysError."""
        with self._changing():
            keys = self.keys()
            if any(key.name == name for key in keys):
                raise KeysError(f"There is a key named {name}; revoke it, or choose another name.")
            key = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
            try:
                new = StoredKey(
                    name=name, roles=frozenset(roles), sha256=_hash(key), created_at=time.time()
                )
            except ValidationError:
                raise KeysError("A name has 1 to 64 letters, digits and . _ @ - .") from None
            self._write([*keys, new])
        return key

    def revoke(self, name: str) -> None:
        with self._changing():
            keys = self.keys()
            left = [key for key in keys if key.name != name]
            if len(left) == len(keys):
                names = ", ".join(key.name for key in keys) or "none"
                raise KeysError(f"No key is named {name}; there are: {names}.")
            self._write(left)

    def _reload(self) -> None:
        try:
            found = os.stat(self.path)
        except OSError:
            seen: tuple[int, ...] = ()
        else:
            # Not mtime, which chmod and chown do not change.
            seen = (found.st_ctime_ns, found.st_ino, found.st_size)
        if seen == self._seen:
            return
        try:
            keys = self.keys()
        except KeysError as error:
            # An error in the file must not lock out all clients. A refusal would not protect the
            # node, because a user who can write the file can also add a key.
            log.error("%s The keys read before stay in force.", error)
        else:
            self._callers = self._beside | {key.sha256: Caller(key.name, key.roles) for key in keys}
        self._seen = seen

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds a lock, so that no two processes change the key file at the same time."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(
                self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600
            )
        except OSError as error:
            raise KeysError(
                f"Cannot write in {self.path.parent} ({error.strerror}); choose another file with"
                " POC_API_KEYS_FILE."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, keys: Sequence[StoredKey]) -> None:
        whole = [{**key.model_dump(mode="json"), "roles": sorted(key.roles)} for key in keys]
        new = self.path.with_name(self.path.name + ".new")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({"keys": whole}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
        except OSError as error:
            raise KeysError(f"Cannot write {self.path} ({error.strerror}).") from None


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
