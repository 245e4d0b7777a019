"""A new host asks the API: whom it trusts, and what it makes of answers."""

import hashlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cli.join.asking import Api, ApiAwayError, CertificateError, RefusedError
from cli.supervise.redis_server import free_port
from cli.terminal import UsageError
from tests.certificates import make_certificate

STANDING = '{"name": "gpu2", "state": "invited", "redis": "10.0.0.1:6379"}'


@dataclass
class Server:
    """Something on loopback that answers over TLS, and writes down what it is asked."""

    port: int
    certificate: Path
    status: int = 200
    body: str = STANDING
    asked: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def fingerprint(self) -> str:
        der = ssl.PEM_cert_to_DER_cert(self.certificate.read_text())
        return hashlib.sha256(der).hexdigest()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    certificate, key = make_certificate(tmp_path, "api")
    server = Server(0, certificate)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.headers.get("Authorization", ""))
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(server.body.encode())))
            self.send_header("X-Server-Recv-Ns", "soon")
            self.end_headers()
            self.wfile.write(server.body.encode())

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.port = http.server_port
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    http.socket = context.wrap_socket(http.socket, server_side=True)
    http.handle_error = lambda *_: None  # type: ignore[method-assign]  # a host that hangs up
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.mark.promise(
    "an attacker between a host and the API", "learns nothing; hosts refuse changed answers"
)
def test_a_certificate_that_nobody_vouches_for_is_told_nothing(server: Server) -> None:
    with pytest.raises(CertificateError, match=r"is not trusted .*--ca FILE"):
        Api.at(server.url).standing("id")
    assert server.asked == []


def test_its_authority_or_its_fingerprint_is_enough(server: Server) -> None:
    trusting = Api.at(server.url, ca=server.certificate.read_text())
    assert trusting.standing("an id").redis == "10.0.0.1:6379"
    pairs = ":".join(server.fingerprint[i : i + 2] for i in range(0, 64, 2)).upper()
    for pin in (server.fingerprint, pairs):
        assert Api.at(f"{server.url}#sha256={pin}").standing("an id").state == "invited"
    assert server.asked == ["Bearer an id"] * 3


@pytest.mark.promise(
    "an attacker between a host and the API", "learns nothing; hosts refuse changed answers"
)
def test_another_certificate_than_the_named_one_is_told_nothing(server: Server) -> None:
    with pytest.raises(CertificateError, match=f"fingerprint sha256={server.fingerprint}"):
        Api.at(f"{server.url}#sha256={'0' * 64}").standing("id")
    assert server.asked == []


def test_a_fingerprint_does_without_the_name(server: Server) -> None:
    named = server.url.replace("127.0.0.1", "localhost")
    assert Api.at(f"{named}#sha256={server.fingerprint}").standing("id").name == "gpu2"
    with pytest.raises(CertificateError, match="Hostname mismatch"):
        Api.at(named, ca=server.certificate.read_text()).standing("id")


@pytest.mark.promise(
    "an attacker between a host and the API", "learns nothing; hosts refuse changed answers"
)
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://10.0.0.1:8000", "is not encrypted.*--allow-http"),
        ("http://node.example.org", "is not encrypted"),
        ("ftp://node", "must look like https://HOST:PORT"),
        ("node:8000", "must look like"),
        ("https://", "must look like"),
        ("https://a:b@node", "must look like"),
        ("https://node:99999", "must look like"),
        ("https://node..one", "must look like"),
        ("https://node#sha256=12", "64 hexadecimal digits"),
        ("https://node#md5=12", "fingerprint"),
        ("http://127.0.0.1#sha256=" + "0" * 64, "of an https"),
    ],
)
def test_a_url_that_is_not_safe_is_refused(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Api.at(url)


def test_without_tls_to_loopback_or_when_told_to() -> None:
    for url in ("http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost"):
        assert not Api.at(url).is_tls
    assert Api.at("http://10.0.0.1:8000/node/", allow_http=True).base == "/node"


def test_a_refusal_is_told_in_the_apis_words(server: Server) -> None:
    server.status, server.body = 403, '{"detail": "The token of gpu2 has expired unused."}'
    api = Api.at(f"{server.url}#sha256={server.fingerprint}")
    for ask in (lambda: api.standing("id"), api.skew_s):
        with pytest.raises(RefusedError, match=r"gpu2 has expired unused\. \(HTTP 403\)"):
            ask()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *[(200, "{}"), (200, "<html>"), (404, "no"), (502, "[]"), (404, "[" * 5000)],
        (200, STANDING.replace("in", "x")),
    ],
)
def test_another_server_is_told(server: Server, status: int, body: str) -> None:
    server.status, server.body = status, body
    with pytest.raises(ApiAwayError, match="is no API of Proofline"):
        Api.at(f"{server.url}#sha256={server.fingerprint}").standing("id")
    with pytest.raises(ApiAwayError, match="is no API of Proofline"):
        Api.at(f"{server.url}#sha256={server.fingerprint}").skew_s()


def test_nobody_there_and_no_tls_there(server: Server) -> None:
    with pytest.raises(ApiAwayError, match="No answer from the API at 127"):
        Api.at(f"https://127.0.0.1:{free_port()}").standing("id")
    with pytest.raises(ApiAwayError, match="No answer from the API"):
        Api.at(server.url.replace("https", "http")).standing("id")


def test_a_file_that_is_no_certificate(server: Server) -> None:
    with pytest.raises(CertificateError, match="--ca has no certificates"):
        Api.at(server.url, ca="nonsense").standing("id")
