"""The courier's start."""

from pathlib import Path
from typing import Any

import fakeredis
import pytest

from workers.courier import main


class BegunError(Exception):
    """It is about to deliver."""


def test_certificates_that_cannot_be_read_are_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only when the first callback needs them."""

    def begun(*_: Any) -> None:
        raise BegunError

    monkeypatch.setenv("POC_CALLBACK_TLS_HOSTS", "aggregator.example")
    monkeypatch.setenv("POC_CALLBACK_CLIENT_CERT", str(tmp_path / "courier.pem"))
    monkeypatch.setattr(main, "connect", lambda _settings: fakeredis.FakeRedis())
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    for name in ("refuse_wrong", "log_to_stderr"):
        monkeypatch.setattr(main, name, lambda *_: None)
    monkeypatch.setattr(main.scripts, "wait_until_loaded", begun)
    with pytest.raises(BegunError):
        main.run_courier()
    assert f"POC_CALLBACK_CLIENT_CERT {tmp_path}/courier.pem is no certificate" in caplog.text
