"""The services of compose.yaml."""

from typing import Any

import pytest

from tests.harness import compose_file


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return compose_file.services()
