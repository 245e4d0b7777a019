"""Micro-batches on their way through the stages of an engine, tick by tick."""

import itertools

import pytest

from tests.harness.pipeline import Ends
from workers.engines import base as ticks


@pytest.fixture(autouse=True)
def ids_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "_IDS", itertools.count())


@pytest.fixture
def ends() -> Ends:
    return Ends()
