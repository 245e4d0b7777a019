"""A joined host's access, kept in a private file so that a restart needs no token."""

import os
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from poc_core.errors import ProoflineError


class AccessError(ProoflineError):
    """The file cannot be read or written; the text says what to do."""


class Access(BaseModel, frozen=True):
    """How this host reaches its node."""

    api: str  # the url of --join
    api_ca: str | None = None  # certificates (PEM)
    allow_http: bool = False
    token_id: str  # shows who asks, and opens nothing
    name: str  # of this host
    redis_url: str  # with this host's user and password
    redis_ca: str | None = None  # certificates (PEM)
    settings: dict[str, str] = {}


def read_access(path: Path) -> Access | None:
    """None: there is no such file. AccessError: it cannot be read, or others may read it."""
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            others = os.fstat(file.fileno()).st_mode & 0o077
            text = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AccessError(f"{path} cannot be read ({error.strerror}).") from None
    if others:
        raise AccessError(
            f"Others may read or write {path}, which has a password: chmod 600 {path}, and have"
            " this host revoked and invited again if they could."
        )
    try:
        return Access.model_validate_json(text)
    except ValidationError:
        raise AccessError(
            f"{path} is not a file of `proofline workers --join`; remove it, and join with a new"
            " token."
        ) from None


def check_writable(path: Path) -> None:
    """AccessError: `write_access` would fail, and the token would be spent for nothing."""
    path = path.expanduser()
    probe = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600))
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_access(path: Path, access: Access) -> None:
    """Only its owner can read it, from its first byte on. AccessError: it cannot be written."""
    path = path.expanduser()
    try:
        _write(path, access.model_dump_json(indent=1))
    except OSError as error:
        raise _unwritable(path, error) from None


def redis_url_of(path: Path, access: Access) -> str:
    """The url of Redis, with a file of the certificates that it is trusted by."""
    if access.redis_ca is None:
        return access.redis_url
    path = path.expanduser()
    certificates = path.with_name(f"{path.name}.redis-ca.pem")
    try:
        _write(certificates, access.redis_ca)
    except OSError as error:
        raise _unwritable(certificates, error) from None
    return f"{access.redis_url}?ssl_ca_certs={quote(str(certificates))}"


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _unwritable(path: Path, error: OSError) -> AccessError:
    return AccessError(
        f"Cannot write {path} ({error.strerror}); choose another place with --join-file."
    )
