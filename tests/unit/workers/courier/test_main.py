"""The courier's start and end."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakeredis
import pytest

from poc_core.state.overview import Overviews
from tests.certificates import HOST, make_certificate
from tests.harness.waiting import wait_until
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


def test_health_knows_of_certificates_that_cannot_be_read_until_they_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    redis = fakeredis.FakeRedis()
    handlers: list[Callable[[], None]] = []
    monkeypatch.setenv("POC_CALLBACK_TLS_HOSTS", HOST)
    monkeypatch.setenv("POC_CALLBACK_CLIENT_CERT", str(tmp_path / "courier.pem"))
    monkeypatch.setenv("POC_WORKER_TTL_S", "2")
    monkeypatch.setattr(main, "connect", lambda _settings: redis)
    monkeypatch.setattr(main.signal, "signal", lambda _, handler: handlers.append(handler))
    monkeypatch.setattr(main, "ALIVE", tmp_path / "alive")
    for name in ("refuse_wrong", "log_to_stderr"):
        monkeypatch.setattr(main, name, lambda *_: None)
    courier = threading.Thread(target=main.run_courier)
    courier.start()
    try:
        overviews = Overviews(redis)
        wait_until(lambda: overviews.read().courier_trouble == "certificates")
        certificate, key = make_certificate(tmp_path, "node")
        (tmp_path / "courier.pem").write_text(certificate.read_text() + key.read_text())
        wait_until(lambda: overviews.read().courier_trouble == "")
    finally:
        handlers[0]()
        courier.join()


def test_a_thread_that_waits_for_a_redis_that_is_away_does_not_delay_its_end() -> None:
    code = """
import time
from concurrent.futures import ThreadPoolExecutor
from cli.run import courier
courier.run_courier = lambda _: ThreadPoolExecutor().submit(time.sleep, 600)
courier.courier()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
