"""Files for `proofline report`, written as by the commands and the API."""

from pathlib import Path

import pytest

from tests.harness.reports import Capture, Reports


@pytest.fixture
def reports(tmp_path: Path, capfd: Capture) -> Reports:
    return Reports(tmp_path, capfd)
