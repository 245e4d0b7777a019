"""Rounds in Redis, and two workers that live."""

import pytest

from tests.harness.stored_rounds import Serve


@pytest.fixture(autouse=True)
def two_workers(serve: Serve) -> None:
    serve("w1")
    serve("w2")
