"""What `doctor` finds of a Redis that answers, and of one that will not do."""

import math
from collections.abc import Callable
from typing import Any, Self

import pytest
from redis.exceptions import ResponseError

from cli.examine.redis import clock_finding, server
from poc_core.settings import Settings

NOW = 1000.0
FINE = {"redis_version": "7.0.15", "role": "master"}


class FakeRedis:
    """Says of itself what it is told to."""

    def __init__(self, info: dict[str, Any], refuses: Exception | None = None) -> None:
        self._info, self._refuses = info, refuses

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def ping(self) -> None:
        if self._refuses is not None:
            raise self._refuses

    def info(self, _section: str) -> dict[str, Any]:
        return self._info

    def time(self) -> tuple[int, int]:
        return int(NOW), 0


Found = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    """(level, what it says) of all that is not well with such a Redis."""

    def look(clock_s: float = NOW, refuses: Exception | None = None, **info: Any) -> Any:
        fake = FakeRedis(FINE | info, refuses)
        monkeypatch.setattr("cli.examine.redis.connections.client", lambda *_, **__: fake)
        findings = server(Settings(), clock=lambda: clock_s)
        return [(one.level, one.says) for one in findings if one.level != "ok"]

    monkeypatch.setattr("cli.examine.redis._SLOW_MS", math.inf)
    return look


def test_a_good_one_has_nothing(found: Found) -> None:
    assert found() == []


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"redis_version": "6.0.16"}, "Its version is 6.0.16."),
        ({"aof_last_write_status": "err"}, "It could not write its append-only file."),
        ({"aof_last_bgrewrite_status": "err"}, "It could not write its append-only file."),
        (
            {"maxmemory": 100 << 20, "used_memory": 99 << 20},
            "99 of its 100 MiB are used; a full Redis refuses writes.",
        ),
    ],
    ids=str,
)
def test_one_that_will_lose_or_refuse_work_is_a_problem(
    found: Found, info: dict[str, Any], says: str
) -> None:
    assert found(**info) == [("problem", says)]


def test_one_that_still_reads_its_file_is_waited_for(found: Found) -> None:
    ((level, says),) = found(refuses=ResponseError("LOADING Redis is loading the dataset"))
    assert level == "problem"
    assert "LOADING" in says


@pytest.mark.parametrize(
    ("limits_ms", "level"), [((0.0, math.inf), "warning"), ((0.0, 0.0), "problem")]
)
def test_one_that_answers_late_is_told(
    found: Found, monkeypatch: pytest.MonkeyPatch, limits_ms: tuple[float, float], level: str
) -> None:
    for name, limit in zip(("_SLOW_MS", "_TOO_SLOW_MS"), limits_ms, strict=True):
        monkeypatch.setattr(f"cli.examine.redis.{name}", limit)
    ((found_level, says),) = found()
    assert found_level == level
    assert says.startswith("It answers in ")


@pytest.mark.parametrize(("ahead_s", "level"), [(2.0, "warning"), (100.0, "problem")])
def test_clocks_that_differ_are_told(found: Found, ahead_s: float, level: str) -> None:
    ((found_level, says),) = found(clock_s=NOW + ahead_s)
    assert (found_level, f"differ by {ahead_s:.2f} s" in says) == (level, True)


def test_a_small_difference_of_clocks_is_too_much_for_shorter_heartbeats() -> None:
    assert clock_finding("Redis'", 0.45, 0.4).level == "problem"
    assert clock_finding("Redis'", 0.45, 2.0).level == "ok"
