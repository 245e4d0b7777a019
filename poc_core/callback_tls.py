"""TLS of callbacks to named receivers: which certificates are trusted, and which is shown.

All files are read again when they change, so certificates can be replaced while callbacks run.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from poc_core.callbacks import canonical_host
from poc_core.errors import ForbiddenReceiverError, ProoflineError

logger = logging.getLogger(__name__)

# Seconds for a handshake alone, and for a refusal after it.
_HANDSHAKE_S = 2.0
# A file's identity, time of its last change (of its contents, owner or rights) and size.
_State = tuple[int, int, int]


class PlainUrlError(ForbiddenReceiverError):
    """A callback to a host that is named would go without TLS."""

    def __init__(self, host: str) -> None:
        super().__init__(f"Callbacks to {host} go by https alone (POC_CALLBACK_TLS_HOSTS).")


class HandshakeError(ProoflineError):
    """The receiver and this node do not take each other's certificates; the text says whose."""


class CertificateError(ProoflineError):
    """A file of POC_CALLBACK_CLIENT_CERT or POC_CALLBACK_TRUSTED_CERTS cannot be used."""


@dataclass(frozen=True)
class TlsNames:
    """The TLS settings of callbacks. `of` raises ValueError where they do not go together."""

    hosts: frozenset[str]
    client: tuple[Path, ...]  # certificate and key in one file, or in two
    trusted: Path | None  # None: the authorities of this system

    @classmethod
    def of(cls, hosts: str, client: str, trusted: Path | None) -> TlsNames:
        try:
            named = frozenset(
                canonical_host(part.strip()) for part in hosts.split(",") if part.strip()
            )
        except ValueError as error:
            raise ValueError(f"POC_CALLBACK_TLS_HOSTS: {error}") from None
        files = tuple(Path(part.strip()) for part in client.split(",") if part.strip())
        if len(files) > 2:
            raise ValueError(
                "POC_CALLBACK_CLIENT_CERT names one file, or a certificate and its key with a "
                "comma between"
            )
        if named and not files and trusted is None:
            raise ValueError(
                "POC_CALLBACK_TLS_HOSTS needs POC_CALLBACK_CLIENT_CERT, "
                "POC_CALLBACK_TRUSTED_CERTS or both"
            )
        if (files or trusted is not None) and not named:
            raise ValueError(
                "POC_CALLBACK_CLIENT_CERT and POC_CALLBACK_TRUSTED_CERTS are for the hosts that "
                "POC_CALLBACK_TLS_HOSTS names, and there are none"
            )
        return cls(named, files, trusted)


NO_TLS = TlsNames.of("", "", None)


class CallbackTls:
    """The TLS context for connections to the named hosts."""

    def __init__(self, names: TlsNames) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._seen: list[_State | None] = []  # the files as they were when they were last tried
        self._context: ssl.SSLContext | None = None
        self._problem: CertificateError | None = None

    def concerns(self, host: str) -> bool:
        return canonical_host(host) in self._names.hosts

    def context(self) -> ssl.SSLContext:
        """The context of the files as they are now; the one before while they cannot be used.

        CertificateError: there was none before.
        """
        problem = self.problem()
        if self._context is None:
            assert problem is not None
            raise problem
        return self._context

    def problem(self) -> CertificateError | None:
        """Why the files as they are now cannot be used; logged once."""
        files = [*self._names.client, *([self._names.trusted] if self._names.trusted else [])]
        with self._lock:
            state = [_state(file) for file in files]
            if state != self._seen:
                try:
                    self._context, self._problem = made(self._names), None
                except CertificateError as error:
                    self._problem = error
                    logger.error("%s", error)
                self._seen = state
            return self._problem


def made(names: TlsNames) -> ssl.SSLContext:
    """A context of the files as they are. CertificateError says which cannot be used, and why."""
    try:
        context = ssl.create_default_context(cafile=names.trusted)
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(
            f"POC_CALLBACK_TRUSTED_CERTS {names.trusted} holds no certificates that can be read "
            f"({_reason(error)})."
        ) from None
    # A receiver's own certificate may be the trusted one, without an authority above it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if names.client:
        try:
            # An empty password, so that nobody is asked for one.
            context.load_cert_chain(names.client[0], names.client[-1], password="")
        except (OSError, ssl.SSLError, ValueError) as error:
            shown = ", ".join(map(str, names.client))
            raise CertificateError(
                f"POC_CALLBACK_CLIENT_CERT {shown} is no certificate with its key "
                f"({_reason(error)})."
            ) from None
    return context


def handshake_problem(error: BaseException) -> str | None:
    """Explains a TLS error for the operator; None for another kind of error."""
    text, seen = "", error
    while True:
        if isinstance(seen, ssl.SSLCertVerificationError):
            trusted = "none that POC_CALLBACK_TRUSTED_CERTS trusts for this name"
            return f"the receiver's certificate is {trusted} ({seen.verify_message})"
        if isinstance(seen, ssl.SSLError):
            text += str(seen).lower()
        below = seen.__cause__ or seen.__context__
        if below is None:
            break
        seen = below
    if "alert" in text and any(word in text for word in ("certificate", "unknown ca", "handshake")):
        return "the receiver does not take the node's certificate (POC_CALLBACK_CLIENT_CERT)"
    return "the receiver speaks no TLS that this node understands" if text else None


def try_handshake(context: ssl.SSLContext, address: str, port: int, host: str) -> str | None:
    """Tries TLS with an address and explains a failure; None if it works or nobody answers.

    Sends nothing after the handshake, so a refusal, which TLS 1.3 brings later, is not lost.
    """
    try:
        with (
            socket.create_connection((address, port), _HANDSHAKE_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as tls,
        ):
            tls.recv(1)
    except TimeoutError:  # the receiver waits for a request
        return None
    except OSError as error:
        return handshake_problem(error)
    return None


def _state(file: Path) -> _State | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns, found.st_size


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
