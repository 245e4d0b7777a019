"""Certificates made for the occasion, by openssl."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

HOST = "127.0.0.1"


def make_certificate(folder: Path, name: str, also: Sequence[str] = ()) -> tuple[Path, Path]:
    """(certificate, key) for HOST and also for others (DNS:name, IP:address), by openssl."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not on PATH")
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"),
            *(
                "-addext",
                f"subjectAltName={','.join([f'IP:{HOST}', *also])}",
                "-addext",
                "keyUsage=critical,digitalSignature,keyCertSign",
            ),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
