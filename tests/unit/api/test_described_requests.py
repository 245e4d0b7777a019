"""The short part of `make fuzz`: every answer is described in our own document."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.described.node import Node
from tests.harness.fuzz import FUZZ

CASES_EACH = 400 if os.environ.get("PROOFLINE_FUZZ") == "long" else 4


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)  # Redis is away in a part of the cases
    yield
    logging.disable(logging.NOTSET)


@FUZZ
@pytest.mark.usefixtures("quiet")
def test_no_request_made_from_our_description_is_answered_otherwise(tmp_path: Path) -> None:
    from bench.described.requests import ask_all  # here: it imports schemathesis

    seen = ask_all(Node(tmp_path), CASES_EACH, seed=12)
    assert {
        "POST /api/v1/pow/generate",
        "GET /api/v1/pow/status",
        "POST /v1/chat/completions",
    } <= set(seen)
    assert sum(statuses.total() for statuses in seen.values()) > 120
