"""`proofline api`: what it sets up before it serves."""

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from api.edge import connections
from cli.main import app


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(host: str, port: int) -> Any:
        return SimpleNamespace(getsockname=lambda: (host, port))

    monkeypatch.setattr("cli.run.api.bound", bound)


def test_what_reads_redis_does_not_wait_long_for_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    while_it_serves: list[float] = []

    def run(*_args: Any) -> None:
        while_it_serves.append(sys.getswitchinterval())

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert CliRunner().invoke(app, ["api"], env={"POC_REQUIRE_KEYS": "never"}).exit_code == 0
    assert while_it_serves == [pytest.approx(0.0005)]


def test_the_setting_of_the_port_is_where_it_listens_unless_an_option_says_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports: list[list[int]] = []

    def run(_server: uvicorn.Server, sockets: list[Any]) -> None:
        ports.append([one.getsockname()[1] for one in sockets])

    monkeypatch.setattr(uvicorn.Server, "run", run)
    env = {"POC_REQUIRE_KEYS": "never", "POC_API_PORT": "8123"}
    assert CliRunner().invoke(app, ["api"], env=env).exit_code == 0
    assert CliRunner().invoke(app, ["api", "--port", "8124"], env=env).exit_code == 0
    two = ["api", "--port", "8080", "--port", "5000"]
    assert CliRunner().invoke(app, two, env=env).exit_code == 0
    env["POC_API_PORT"] = "8080 5000"
    assert CliRunner().invoke(app, ["api"], env=env).exit_code == 0
    assert ports == [[8123], [8124], [8080, 5000], [8080, 5000]]


def test_each_port_listens_on_the_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    listening: list[tuple[str, int]] = []

    def run(_server: uvicorn.Server, sockets: list[Any]) -> None:
        listening.extend(one.getsockname() for one in sockets)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    env = {"POC_REQUIRE_KEYS": "never"}
    two = ["api", "--port", "8080", "--port", "5000"]
    for host in ([], ["--host", "10.0.0.1"], ["--host", "::1"]):
        assert CliRunner().invoke(app, [*two, *host], env=env).exit_code == 0
    assert listening == [
        (host, port) for host in ("127.0.0.1", "10.0.0.1", "::1") for port in (8080, 5000)
    ]


def test_no_request_waits_until_all_that_was_imported_is_looked_through_for_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_through: list[bool] = []

    def run(server: uvicorn.Server, _sockets: Any) -> None:
        looked_through.append(any(found is server.config.app for found in gc.get_objects()))

    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert CliRunner().invoke(app, ["api"], env={"POC_REQUIRE_KEYS": "never"}).exit_code == 0
    assert looked_through == [False]


def test_connections_have_limits_and_no_header_says_whose_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, _: given.append(server.config))
    monkeypatch.setattr("cli.run.api.raise_file_limit", lambda: 2**20)
    assert CliRunner().invoke(app, ["api"], env={"POC_REQUIRE_KEYS": "never"}).exit_code == 0
    assert given[0].http.limits == connections.Limits(4096, request_s=60)
    assert given[0].limit_concurrency == 4098
    assert (given[0].ws, given[0].proxy_headers) == ("none", False)
