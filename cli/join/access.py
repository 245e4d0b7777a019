"""Stores a joined host's access to its node in a private file, for restarts without a token."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from poc_core.errors import ProoflineError


class AccessError(ProoflineError):
    """A host's access file is unreadable, unwritable or not private. The text says what to do."""


class Access(BaseModel, frozen=True):
    """The urls, certificates and settings with which a joined host reaches its node."""

    api: str  # the url of --join
    api_ca: str | None = None  # certificates (PEM)
    allow_http: bool = False
    token_id: str  # identifies this host, and gives no access
    name: str  # this host's name
    redis_url: str  # with this host's user and password
    redis_ca: str | None = None  # certificates (PEM)
    settings: dict[str, str] = {}


def read_access(path: Path) -> Access | None:
    """Reads a host's access from a file; None if there is no file. Raises AccessError."""
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
            f"Others may read or write {path}, which has a password: chmod 600 {path}. If others"
            " could read the file, revoke this host and invite it again."
        )
    try:
        return Access.model_validate_json(text)
    except ValidationError:
        raise AccessError(
            f"{path} is not a file of `proofline workers --join`; remove it, and join with a new"
            " token."
        ) from None


def check_writable(path: Path) -> None:
    """Raises AccessError if the file cannot be written. Call this before using up the token."""
    path = path.expanduser()
    probe = path.with_name(f"{path.name}.new")
    with _writing(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600))
        probe.unlink()


def write_access(path: Path, access: Access) -> None:
    """Writes the access file, unreadable for other users. Raises AccessError if that fails."""
    _write(path.expanduser(), access.model_dump_json(indent=1))


def redis_url_of(path: Path, access: Access) -> str:
    """Returns the host's Redis url. Writes the certificates, if any, to a file named in the url."""
    if access.redis_ca is None:
        return access.redis_url
    path = path.expanduser()
    certificates = path.with_name(f"{path.name}.redis-ca.pem")
    _write(certificates, access.redis_ca)
    return f"{access.redis_url}?ssl_ca_certs={quote(str(certificates))}"


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    with _writing(path):
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AccessError(
            f"Cannot write {path} ({error.strerror}); choose another place with --join-file."
        ) from None
