"""The generated parts of the pages are as the code, the tests and their data have them."""

import pytest

from scripts.docs_tables import PARTS, current
from tests.harness.documents import ROOT


@pytest.mark.parametrize("page", PARTS)
def test_a_generated_part_is_current(page: str) -> None:
    assert (ROOT / page).read_text() == current(page), "run `make docs-tables`"


def test_there_are_promises_for_everybody() -> None:
    rows = (ROOT / "SECURITY.md").read_text().split("<!-- generated: promises -->")[1]
    assert rows.count("](tests/") >= 60
