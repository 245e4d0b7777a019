"""Helm renders docker/chart without a cluster."""

from collections.abc import Iterator
from functools import cache

import pytest
from kubernetes_validate import utils


@pytest.fixture(scope="package", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """kubernetes_validate reads 2 MB for each object that it looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", cache(utils.schema_contents))
        yield
