"""A joining host's requests to the API. TLS requests go only to a trusted server."""

import hashlib
import hmac
import http.client
import ipaddress
import json
import re
import ssl
import time
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from cli.terminal import UsageError
from poc_core.answers import HostStanding
from poc_core.errors import ProoflineError
from poc_core.joining.offers import SealedOffer

T = TypeVar("T", bound=BaseModel)

_TIMEOUT_S = 10.0
_MOST_BYTES = 1_000_000
_PIN = re.compile(r"sha256[=:]([0-9A-Fa-f]{2}(:?[0-9A-Fa-f]{2}){31})")


class ApiAwayError(ProoflineError):
    """The API does not answer, or a server that is no Proofline API answers at its address."""


class CertificateError(ProoflineError):
    """This host does not trust the certificate of the API."""


class RefusedError(ProoflineError):
    """The API refuses a request of this host. `text`: the reason. `status`: the HTTP status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Api:
    """A client for the API of the node that a host joins.

    `pin`: SHA-256 (hexadecimal) of the only certificate that the host trusts. `ca`: trusted
    certificates (PEM), which replace the system's certificates.
    """

    url: str
    host: str
    port: int
    base: str  # path before /api/v1
    is_tls: bool
    pin: str | None = None
    ca: str | None = None

    @classmethod
    def at(cls, url: str, ca: str | None = None, allow_http: bool = False) -> "Api":
        """Returns the API at `url`, https://HOST:PORT or https://HOST:PORT#sha256=FINGERPRINT.

        Raises UsageError for an invalid url, or for http:// without `allow_http`.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")  # as the connection does
        except ValueError:
            host = None
        if host is None or parts.scheme not in ("http", "https") or "@" in parts.netloc:
            raise UsageError("--join must look like https://HOST:PORT, the url of the node's API.")
        is_tls = parts.scheme == "https"
        if not is_tls and not allow_http and not _is_loopback(host):
            raise UsageError(
                f"http://{host} is not encrypted, so others on the network could use this host's"
                " token. Put a TLS proxy before the API (https://), or tunnel to its loopback;"
                " --allow-http joins anyway."
            )
        pin = _PIN.fullmatch(parts.fragment)
        if parts.fragment and (pin is None or not is_tls):
            raise UsageError(
                "What follows # in --join must be the certificate's fingerprint: sha256= and 64"
                " hexadecimal digits, of an https:// url (openssl x509 -noout -fingerprint"
                " -sha256)."
            )
        if pin is not None and ca is not None:
            raise UsageError("A fingerprint in --join and --ca exclude each other; keep one.")
        return cls(
            url=url,
            host=host,
            port=port or (443 if is_tls else 80),
            base=parts.path.rstrip("/"),
            is_tls=is_tls,
            pin=pin[1].replace(":", "").lower() if pin else None,
            ca=ca,
        )

    def join(self, token_id: str) -> SealedOffer:
        """Uses up the token: fetches the host's settings, which the API returns only once."""
        return self._read(SealedOffer, "POST", "/api/v1/hosts/join", token_id)

    def standing(self, token_id: str) -> HostStanding:
        """Fetches the token's state. Raises ApiAwayError if the API does not answer,
        CertificateError if its certificate is not trusted, RefusedError if the API refuses the
        request.
        """
        return self._read(HostStanding, "GET", "/api/v1/hosts/standing", token_id)

    def skew_s(self) -> float:
        """Returns this host's time minus the API's time, in seconds. Raises as `standing` does."""
        before = time.time()
        answer, body = self._ask("GET", "/api/v1/clock")
        try:
            of_api = int(answer.headers.get("X-Server-Recv-Ns", "")) / 1e9
        except (ValueError, OverflowError):
            raise self._refusal(answer, body) from None
        return (before + time.time()) / 2 - of_api

    def _read(self, model: type[T], method: str, path: str, token_id: str) -> T:
        answer, body = self._ask(method, path, token_id)
        if answer.status != 200:
            raise self._refusal(answer, body)
        try:
            return model.model_validate_json(body)
        except ValidationError:
            raise self._another() from None

    def _refusal(self, answer: http.client.HTTPResponse, body: bytes) -> ProoflineError:
        try:
            return RefusedError(
                f"{json.loads(body)['detail']} (HTTP {answer.status})", answer.status
            )
        except (KeyError, TypeError, ValueError, RecursionError):
            return self._another()

    def _ask(
        self, method: str, path: str, token_id: str = ""
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = self._connection()
        headers = {"Authorization": f"Bearer {token_id}"} if token_id else {}
        try:
            connection.connect()
            self._check_pin(connection)
            connection.request(method, self.base + path, headers=headers)
            answer = connection.getresponse()
            return answer, answer.read(_MOST_BYTES)
        except ssl.SSLCertVerificationError as error:
            raise CertificateError(
                f"The certificate of {self.host}:{self.port} is not trusted"
                f" ({error.verify_message}): give --ca FILE with its authority, or its fingerprint"
                " in the url (#sha256=...)."
            ) from None
        except (OSError, http.client.HTTPException) as error:
            hint = "; does it speak TLS?" if isinstance(error, ssl.SSLError) else ""
            raise ApiAwayError(
                f"No answer from the API at {self.host}:{self.port} ({error}){hint}"
            ) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if not self.is_tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        try:
            context = ssl.create_default_context(cadata=self.ca)
        except ssl.SSLError as error:
            raise CertificateError(
                f"--ca has no certificates that can be read ({error})."
            ) from None
        if self.pin is not None:  # only the pinned certificate, regardless of its issuer and name
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=_TIMEOUT_S, context=context
        )

    def _check_pin(self, connection: http.client.HTTPConnection) -> None:
        """Raises CertificateError if the server's certificate is not the pinned certificate."""
        if self.pin is None:
            return
        assert isinstance(connection.sock, ssl.SSLSocket)
        shown = hashlib.sha256(connection.sock.getpeercert(binary_form=True) or b"").hexdigest()
        if not hmac.compare_digest(shown, self.pin):
            raise CertificateError(
                f"{self.host}:{self.port} shows another certificate than the url names, with the"
                f" fingerprint sha256={shown}. Ask the operator whether the certificate was"
                " renewed. If not, another server answers here."
            )

    def _another(self) -> ApiAwayError:
        return ApiAwayError(
            f"What answers at {self.host}:{self.port} is no API of Proofline, or one of another"
            " version; check the url."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
