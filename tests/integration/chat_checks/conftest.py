"""Engines that serve chat in a test's own process."""

from collections.abc import Iterator

import pytest

from tests.integration.chat_checks.known import Server, served
from tests.stacks.deployments import QWEN3


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, forked_engines: None) -> Iterator[Server]:
    """tiny-qwen3 in float32, in steps of so many tokens: one for all that name as many."""
    with served(QWEN3, request.param) as found:
        yield found


@pytest.fixture(scope="module")
def deployed(request: pytest.FixtureRequest, forked_engines: None) -> Iterator[Server]:
    """A Deployment in steps of 256 tokens."""
    with served(request.param, 256) as found:
        yield found
