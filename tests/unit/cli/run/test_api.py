"""`proofline api`: what it sets up before it serves."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from cli.main import app


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_what_reads_redis_does_not_wait_long_for_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    while_it_serves: list[float] = []

    def run(*_args: Any, **_options: Any) -> None:
        while_it_serves.append(sys.getswitchinterval())

    monkeypatch.setattr(uvicorn, "run", run)
    assert CliRunner().invoke(app, ["api"], env={"POC_REQUIRE_KEYS": "never"}).exit_code == 0
    assert while_it_serves == [pytest.approx(0.0005)]
