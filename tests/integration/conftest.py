"""The real stack: redis-server, API and workers as processes of their own."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest
import redis

from cli.machine import cpu_memory
from cli.supervise.processes import Child
from tests.integration.node import Node, run_node
from tests.integration.processes import engine_cores
from tests.stacks.deployments import Deployment
from tests.stacks.forked_engines import forked
from tests.stacks.round_client import FAST
from workers.engines.base import Engine
from workers.vllm.start import cpu_threads
from workers.vllm.start.launch import garbage_may_wait

_CORES: dict[int, list[psutil.Process]] = {}  # by id of the engine


@pytest.fixture(autouse=True, scope="session")
def no_settings_from_outside() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("POC_", "VLLM_CPU_"))]:
            patch.delenv(name)
        # Two engines that know nothing of each other, in two processes of `make test`, would take
        # the same core each.
        patch.setenv(cpu_threads.VARIABLE, "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(cpu_memory.VARIABLE, "1")
        # Triton's products of float32, as vLLM's experts have them on GPUs, round to TF32 else.
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        yield


@pytest.fixture(scope="session")
def forked_engines() -> Iterator[None]:
    """vLLM is imported once for all engines in this process; not where it would take CUDA along."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    with forked(), pytest.MonkeyPatch.context() as patch:
        with garbage_may_wait():
            # Where it meets a model's class for the first time, it would import all of itself once
            # more to look at it.
            patch.setattr(
                "vllm.model_executor.models.registry._run_in_subprocess", lambda look: look()
            )
        yield


@pytest.fixture(scope="session")
def vllm_engine(request: pytest.FixtureRequest, forked_engines: None) -> Iterator[Engine]:
    """A real engine in this process, of the Deployment that tests are parametrized with: one
    for all that name it.
    """
    import torch

    deployment: Deployment = request.param
    if torch.cuda.is_available() and torch.cuda.device_count() < deployment.ranks:
        pytest.skip(f"needs {deployment.ranks} GPUs")
    others = engine_cores(os.getpid())
    engine = deployment.start()
    _CORES[id(engine)] = [core for core in engine_cores(os.getpid()) if core not in others]
    yield engine
    engine.close()


@pytest.fixture
def own_cores(vllm_engine: Engine) -> list[psutil.Process]:
    """The processes of that engine's core, beside those of other engines of this process."""
    return _CORES[id(vllm_engine)]


@pytest.fixture(scope="session")
def shared_node() -> Iterator[Node]:
    """What `node` is, for all tests."""
    with ExitStack() as exits:
        yield run_node(exits, workers=2, synthetic_step_ms=50.0, env=FAST, max_fast_crashes=1000)


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    """Two workers at 50 ms a batch, for all tests of the group "node": leave it whole.

    Jobs that a test began and left, as one that fails does, are cancelled after it.
    """
    yield shared_node
    shared_node.cancel_all()


@pytest.fixture
def back(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """What is killed stays away until this is called, or else to the test's end."""
    are_back = threading.Event()
    pause: Callable[[Child, float], bool] = vars(Child)["_pause"]

    def stay_away(child: Child, _seconds: float) -> bool:
        while not (are_back.is_set() or pause(child, 0.02)):
            pass
        return pause(child, 0)

    monkeypatch.setattr(Child, "_pause", stay_away)
    yield are_back.set
    are_back.set()


@pytest.fixture
def redis_of() -> Iterator[Callable[[Node], redis.Redis]]:
    """A client of a node's Redis."""
    with ExitStack() as exits:
        yield lambda node: exits.enter_context(redis.Redis.from_url(str(node.stack.redis_url)))
