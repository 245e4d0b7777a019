"""TLS for callbacks to the hosts in POC_CALLBACK_TLS_HOSTS: trusted and client certificates. A
changed certificate file is read again.
"""

import logging
import socket
import ssl
import threading
from pathlib import Path

from poc_core.callbacks import canonical_host
from poc_core.errors import ForbiddenReceiverError, ProoflineError
from poc_core.settings.callbacks import TlsNames

logger = logging.getLogger(__name__)

# Seconds to wait for a handshake, and afterwards for a refusal of the certificate.
_HANDSHAKE_S = 2.0
# A file's inode, ctime (contents, owner or permissions changed) and size.
_State = tuple[int, int, int]


class PlainUrlError(ForbiddenReceiverError):
    """The callback url of a host in POC_CALLBACK_TLS_HOSTS does not use https."""

    def __init__(self, host: str) -> None:
        super().__init__(f"Callbacks to {host} go by https alone (POC_CALLBACK_TLS_HOSTS).")


class HandshakeError(ProoflineError):
    """A TLS handshake with a receiver failed, for example because of a rejected certificate."""


class CertificateError(ProoflineError):
    """A file of POC_CALLBACK_CLIENT_CERT or POC_CALLBACK_TRUSTED_CERTS cannot be used."""


NO_TLS = TlsNames(frozenset(), (), None)


class CallbackTls:
    """A loader of the TLS context for connections to the hosts in POC_CALLBACK_TLS_HOSTS."""

    def __init__(self, names: TlsNames) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._seen: list[_State | None] = []  # the files' states at the last attempt to load them
        self._context: ssl.SSLContext | None = None
        self._problem: CertificateError | None = None

    def concerns(self, host: str) -> bool:
        """Returns True if connections to `host` must use the context (POC_CALLBACK_TLS_HOSTS)."""
        return canonical_host(host) in self._names.hosts

    def context(self) -> ssl.SSLContext:
        """Returns the TLS context. If changed certificate files are unusable, returns the context
        that was loaded before them. CertificateError if no context was loaded before.
        """
        problem = self.problem()
        if self._context is None:
            assert problem is not None
            raise problem
        return self._context

    def problem(self) -> CertificateError | None:
        """Loads changed certificate files. Returns the error if they are unusable, else None."""
        with self._lock:
            state = [_state(file) for file in (*self._names.client, self._names.trusted) if file]
            if state != self._seen:
                try:
                    self._context, self._problem = made(self._names), None
                except CertificateError as error:
                    self._problem = error
                    logger.error("%s", error)
                self._seen = state
            return self._problem


def made(names: TlsNames) -> ssl.SSLContext:
    """Builds a TLS context from certificate files. Raises CertificateError, which names the file,
    if a file is unusable.
    """
    try:
        context = ssl.create_default_context(cafile=names.trusted)
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(
            f"POC_CALLBACK_TRUSTED_CERTS {names.trusted} holds no certificates that can be read "
            f"({_reason(error)})."
        ) from None
    # The file may contain a receiver's own certificate, without the authority that signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if names.client:
        try:
            # With an empty password OpenSSL does not prompt for one.
            context.load_cert_chain(names.client[0], names.client[-1], password="")
        except (OSError, ssl.SSLError, ValueError) as error:
            shown = ", ".join(map(str, names.client))
            raise CertificateError(
                f"POC_CALLBACK_CLIENT_CERT {shown} is no certificate with its key "
                f"({_reason(error)})."
            ) from None
    return context


def handshake_problem(error: BaseException) -> str | None:
    """Returns an explanation for the operator if TLS caused `error`; None for all other errors."""
    text = ""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            trusted = "none that POC_CALLBACK_TRUSTED_CERTS trusts for this name"
            return f"the receiver's certificate is {trusted} ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            text += str(cause).lower()
        cause = cause.__cause__ or cause.__context__
    if "alert" in text and any(word in text for word in ("certificate", "unknown ca", "handshake")):
        return "the receiver does not take the node's certificate (POC_CALLBACK_CLIENT_CERT)"
    return "the receiver speaks no TLS that this node understands" if text else None


def try_handshake(context: ssl.SSLContext, address: str, port: int, host: str) -> str | None:
    """Tries a TLS handshake with `address`. Returns an explanation if TLS fails; None if TLS works
    or nobody answers. `host`: the server name that the certificate must have.

    With TLS 1.3 a receiver rejects a client certificate after the handshake, so the function waits
    for data. The function sends nothing, because a failed send would hide the rejection.
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
