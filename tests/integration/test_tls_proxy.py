"""docker/tls/nginx.conf in a real nginx before a real API: who shows the pinned certificate is let
in, nobody else.

Without an nginx on PATH (`apt-get install nginx-light`) these are skipped, which says so.
"""

import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import fakeredis
import httpx
import pytest

from api.app import create_app
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from cli.examine.receiver import receiver
from cli.supervise.redis_server import free_port
from poc_core.settings import Settings
from tests.certificates import HOST, make_certificate
from tests.harness.compose_file import ROOT
from tests.harness.samples import RecordingDispatcher
from tests.harness.waiting import wait_until
from tests.stacks.served import port_of, served

pytestmark = pytest.mark.integration

NAMES = ("server", "client", "stranger")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/run/tls, and a stranger's certificate that nobody trusts."""
    folder = tmp_path_factory.mktemp("tls")
    for name in NAMES:
        certificate, key = make_certificate(folder, name)
        certificate.rename(folder / f"{name}.crt")
        both = (folder / f"{name}.crt").read_text() + key.read_text()
        (folder / f"{name}.both").write_text(both)
    return folder


@pytest.fixture(scope="module")
def api_port() -> Iterator[int]:
    """An API that wants keys of everybody but its proxy."""
    settings = Settings(require_keys="always", trusted_networks=HOST)
    services = Services(settings, fakeredis.FakeRedis(), cast(Dispatcher, RecordingDispatcher()))
    with served(create_app(services=services)) as server:
        yield port_of(server)


@pytest.fixture(scope="module")
def proxy(folder: Path, api_port: int) -> Iterator[str]:
    """The url of one with the very file that Compose and Kubernetes mount, but for places that are
    containers'."""
    nginx = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    port = free_port()
    text = (ROOT / "docker" / "tls" / "nginx.conf").read_text()
    for there, here in {
        "/tmp/": f"{folder}/",  # first: the folder may lie there
        "api:8000": f"{HOST}:{api_port}",
        "listen 8443": f"listen {HOST}:{port}",
        "/run/tls/": f"{folder}/",
    }.items():
        assert there in text
        text = text.replace(there, here)
    file = folder / "nginx.conf"
    file.write_text(text)
    process = subprocess.Popen([nginx, "-c", str(file), "-g", "daemon off;"], stderr=sys.stderr)
    try:
        wait_until(lambda: (folder / "nginx.pid").exists() and process.poll() is None, "nginx")
        yield f"https://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, folder: Path, shows: str | None) -> httpx.Response:
    """As the network's API process does, which trusts the proxy's certificate alone."""
    context = ssl.create_default_context(cafile=folder / "server.crt")
    if shows is not None:
        context.load_cert_chain(folder / f"{shows}.both")
    return httpx.get(f"{url}/api/v1/state", verify=context, trust_env=False, timeout=30)


def test_with_the_pinned_certificate_the_node_answers_without_a_key(
    folder: Path, proxy: str
) -> None:
    answer = ask(proxy, folder, "client")
    assert (answer.status_code, answer.json()["state"]) == (200, "STOPPED")


@pytest.mark.parametrize("shows", [None, "stranger"])
def test_without_it_or_with_another_the_node_is_not_even_asked(
    folder: Path, proxy: str, shows: str | None
) -> None:
    answer = ask(proxy, folder, shows)
    assert answer.status_code == 400
    assert "SSL certificate" in answer.text


class TestDoctor:
    """`proofline doctor --callback-url` at a receiver behind such a proxy."""

    def look(
        self, url: str, folder: Path, shows: str | None, trusts: str = "server"
    ) -> tuple[str, str]:
        settings = Settings(
            callback_tls_hosts=HOST,
            callback_client_cert=str(folder / f"{shows}.both") if shows else "",
            callback_trusted_certs=folder / f"{trusts}.crt",
        )
        found = receiver(f"{url}/livez", settings)
        return found.level, found.says

    def test_finds_nothing_wrong_with_the_right_certificates(
        self, folder: Path, proxy: str
    ) -> None:
        level, says = self.look(proxy, folder, "client")
        assert (level, says) == (
            "ok",
            f"{proxy}/livez answers (by TLS with the configured certificates)",
        )

    @pytest.mark.parametrize("shows", [None, "stranger"])
    def test_says_that_the_nodes_certificate_is_not_taken(
        self, folder: Path, proxy: str, shows: str | None
    ) -> None:
        level, says = self.look(proxy, folder, shows)
        assert level == "problem"
        assert "does not take the node's certificate (POC_CALLBACK_CLIENT_CERT)" in says

    def test_says_that_the_receivers_certificate_is_another(self, folder: Path, proxy: str) -> None:
        level, says = self.look(proxy, folder, "client", trusts="stranger")
        assert level == "problem"
        assert "none that POC_CALLBACK_TRUSTED_CERTS trusts for this name" in says

    def test_names_a_file_that_cannot_be_used(self, folder: Path, proxy: str) -> None:
        level, says = self.look(proxy, folder, "nobody")
        assert level == "problem"
        assert "nobody.both is no certificate with its key (No such file or directory)" in says
