"""`doctor` tries a handshake with a receiver named for mutual TLS.

Behind a real proxy: tests/integration/test_tls_proxy.py.
"""

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.examine.findings import Finding
from cli.examine.receiver import receiver
from poc_core.settings import Settings
from tests.certificates import HOST, make_certificate
from tests.peers.receiver import Receiver

Look = Callable[..., Finding]


@pytest.fixture
def look(tmp_path: Path) -> Iterator[Look]:
    """What it finds, with the node's certificate and key in these files."""
    node, own = make_certificate(tmp_path, "node"), make_certificate(tmp_path, "receiver")
    make_certificate(tmp_path, "stranger")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*own)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(node[0])
    with Receiver(tls=context) as there:

        def look(shows: str, url: str = there.url) -> Finding:
            settings = Settings(
                callback_tls_hosts=HOST,
                callback_client_cert=f"{tmp_path}/{shows}.pem,{tmp_path}/{shows}.key"
                if shows
                else "",
                callback_trusted_certs=own[0],
            )
            return receiver(url, settings)

        yield look


def test_the_right_certificates_are_well(look: Look) -> None:
    found = look("node")
    assert found.level == "ok"
    assert found.says.endswith("answers (by TLS with the configured certificates)")


@pytest.mark.parametrize("shows", ["", "stranger"])
def test_a_certificate_that_is_not_taken_is_a_problem(look: Look, shows: str) -> None:
    found = look(shows)
    assert found.level == "problem"
    why = "the receiver does not take the node's certificate (POC_CALLBACK_CLIENT_CERT)"
    assert f": {why}." in found.says


def test_a_file_that_is_not_there_is_a_problem(look: Look) -> None:
    found = look("nobody")
    assert (found.level, found.about) == ("problem", "receiver")
    assert "nobody.key is no certificate with its key" in found.says


def test_an_url_in_the_clear_is_a_problem(look: Look) -> None:
    found = look("node", "http://127.0.0.1:1/")
    assert found.says == f"Callbacks to {HOST} go by https alone (POC_CALLBACK_TLS_HOSTS)."


def test_a_certificate_of_a_private_authority_is_named_as_the_cause(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = make_certificate(tmp_path, "receiver")
    context.load_cert_chain(certificate, key)
    with Receiver(tls=context) as there:
        found = receiver(there.url, Settings())
        assert (found.level, "firewall" in found.remedy) == ("problem", False)
        assert "POC_CALLBACK_TRUSTED_CERTS" in found.remedy
        settings = Settings(callback_tls_hosts=HOST, callback_trusted_certs=certificate)
        assert receiver(there.url, settings).level == "ok"
