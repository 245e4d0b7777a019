"""The real stack: redis-server, API and workers as processes of their own."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from tests.integration.node import Node, run_node


@pytest.fixture(autouse=True, scope="session")
def no_settings_from_outside() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("POC_", "VLLM_CPU_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """Two workers at 50 ms a batch, for all tests of a module: leave it as you found it."""
    with ExitStack() as exits:
        yield run_node(exits, workers=2, synthetic_step_ms=50.0)


@pytest.fixture
def start_node() -> Iterator[Callable[..., Node]]:
    """Starts nodes of the test's own (options of Stack), to be broken."""
    with ExitStack() as exits:
        yield lambda **options: run_node(exits, **options)


@pytest.fixture
def redis_of() -> Iterator[Callable[[Node], redis.Redis]]:
    """A client of a node's Redis."""
    with ExitStack() as exits:
        yield lambda node: exits.enter_context(redis.Redis.from_url(str(node.stack.redis_url)))
