"""What tests of workers share."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from poc_core.periodic import Periodic


@pytest.fixture
def keep_house(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Housekeepers made from now on keep house where a test says so, each time looking for stuck
    jobs too: a thread that got no turn would have seen nothing, and proven nothing.
    """
    made: list[Periodic] = []

    class ByHand(Periodic):
        def start(self) -> None:
            made.append(self)

    monkeypatch.setattr("workers.housekeeping.Periodic", ByHand)
    at_once = SimpleNamespace(uniform=lambda *_: 0.0)
    monkeypatch.setattr("workers.housekeeping.random", at_once)
    return lambda: made[-1].once()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that replaces itself ends by SystemExit."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("workers.proofs.os._exit", leave)
