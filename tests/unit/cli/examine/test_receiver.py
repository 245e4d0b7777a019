"""`doctor --callback-url`: the node's own services are no receivers, whatever name leads there."""

import socket
from typing import Any

import httpx
import pytest

from cli.examine.receiver import receiver
from poc_core.settings import Settings

ADDRESSES = {"redis": "172.18.0.2", "aggregator": "172.18.0.9", "aggregator.example": "8.8.8.8"}


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The urls that were asked, and through which proxy. Redis is away."""
    seen: list[tuple[str, Any]] = []

    def get(url: str, proxy: Any, **_: Any) -> httpx.Response:
        seen.append((url, proxy))
        return httpx.Response(404)

    def connect(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: [(2, 1, 6, "", (ADDRESSES[host], 0))]
    )
    return seen


@pytest.mark.parametrize("host", ["redis", "172.18.0.2"])
def test_redis_is_not_asked(
    host: str, asked: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ADDRESSES, "172.18.0.2", "172.18.0.2")
    found = receiver(f"http://{host}:6379/", Settings(redis_url="redis://redis:6379/0"))
    assert (found.level, "the node's own" in found.says, asked) == ("problem", True, [])


def test_another_port_and_another_host_are(asked: list[tuple[str, Any]]) -> None:
    settings = Settings(redis_url="redis://redis:6379/0")
    for url in ("http://redis:9100/", "http://aggregator:6379/"):
        found = receiver(url, settings)
        assert found.level == "ok"
    assert len(asked) == 2


def test_public_receivers_are_asked_through_the_proxy(asked: list[tuple[str, Any]]) -> None:
    settings = Settings(redis_url="redis://redis:6379/0", callback_proxy="http://proxy:3128")
    for url in ("http://aggregator.example/", "http://aggregator/"):
        receiver(url, settings)
    assert [proxy for _, proxy in asked] == ["http://proxy:3128", None]
