"""`proofline round` against a stand-in for the API."""

import httpx
import pytest
from typer.testing import CliRunner

from proofline.client import sync as client_module
from tests.peers.round_api import FakeApi


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake, client = FakeApi(), httpx.Client
    transport = httpx.MockTransport(fake.answer)
    monkeypatch.setattr(
        client_module.httpx,
        "Client",
        lambda **options: client(**options | {"transport": transport}),
    )
    return fake


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PROOFLINE_URL", raising=False)
    return CliRunner()
