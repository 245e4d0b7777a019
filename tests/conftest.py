"""What every kind of test shares: which are skipped here, and how `make test` deals them out to
its processes.
"""

import gc
import itertools
import logging
import os
import random
import zlib
from collections.abc import Generator, Iterator

import httpx
import pytest

from cli.supervise import redis_server
from poc_core.serving import logs
from tests.harness.chat_client import vllm_args
from tests.stacks.round_client import FAST, RoundClient
from tests.stacks.up import PATIENCE_S, Up
from workers.vllm.start import cpu_threads

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of OpenMP wait for each other with their CPU in hand, which the other processes of
    # `make test` want.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Each process has free ports of its own: a port is free until the server that it was chosen for
    # listens, which takes seconds. Another run on this machine mostly has other ports.
    _number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    _part = (_number + 4 * zlib.crc32(os.environ["PYTEST_XDIST_TESTRUNUID"].encode())) % 16
    _ports = range(20_000 + 798 * _part, 20_000 + 798 * (_part + 1))
    vars(redis_server)["_PORTS"] = itertools.cycle(random.sample(_ports, len(_ports)))

# Tests that share an engine or a stack run in one process, in this order: `make test` begins with
# what takes longest, and what is quick fills the gaps. Unit tests come last: what one of them might
# leave in its process reaches no stack. A module without mark xdist_group is a group of its own:
# its fixtures are made once, and xdist, which counts all groups after each test, has hundreds to
# count and not thousands.
LONGEST_FIRST = (
    *("engines", "up", "node", "test_rounds", "two-workers", "test_joining", "sharing"),
    *("test_command", "broker", "test_cli_stack", "test_new_scheme", "test_large_jobs"),
)


# What is imported and collected stays: looking through it for garbage took a fifth of the time of
# collecting, and a sixth of that of unit tests.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)  # xdist looks for the mark; pytest would part tests of one engine
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            is_unit = not item.get_closest_marker("integration")
            place = f"{item.path.parent.name}/" if is_unit else ""
            item.add_marker(pytest.mark.xdist_group(f"{place}{item.path.stem}"))
    yield
    engines = dict.fromkeys(engine_of(item) for item in items if engine_of(item))
    turns = {name: number for number, name in enumerate([*engines, ""])}
    items.sort(key=lambda item: (*turn(item), turns[engine_of(item)]))


def turn(item: pytest.Item) -> tuple[int, str, bool]:
    """By which tests are sorted, those of one engine together; others of one group stay in the
    order of their modules.
    """
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    group = str(mark.args[0])
    if "/" in group:  # a module of unit tests
        return len(LONGEST_FIRST) + 1, group, False
    place = LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)
    return place, group, item.get_closest_marker("ends_its_stack") is not None


def engine_of(item: pytest.Item) -> str:
    """The deployment whose engine a test asks for by `vllm_engine`; "" without one."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return ""
    return str(item.callspec.params.get("vllm_engine", ""))


def skip_without_gpu(items: list[pytest.Item]) -> None:
    if not items:
        return
    import torch  # only now: unit tests start faster without it

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def no_log_handlers_stay() -> Iterator[None]:
    """Removes the handlers of a command that ran in this process: their stderr is closed after the
    test, and each later log line would print an error to another test's stderr.
    """
    yield
    for name in (*vars(logs)["_OURS"], *vars(logs)["_READ_BY_SUPERVISORS"]):
        logger = logging.getLogger(name)
        if not logger.propagate:
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
            for handler in [one for one in logger.handlers if type(one) is logging.StreamHandler]:
                logger.removeHandler(handler)


@pytest.fixture(scope="session")
def up() -> Iterator[Up]:
    """`proofline up` with one real engine in float32, for all that only asks it; chat goes
    first (yield).
    """
    settings = {
        **FAST,
        "POC_GENERATE_CHUNK_TIMEOUT_SEC": str(2 * PATIENCE_S),
        # As all engines of `make test`: threads that wait for each other take others' cores.
        # `proofline demo` is tested with none of these.
        "OMP_NUM_THREADS": "1",
        cpu_threads.VARIABLE: "nobind",
    }
    up = Up(
        "--model",
        "tiny-qwen3",
        "--dtype",
        "float32",
        "--port",
        "0",
        "--",
        *vllm_args(),
        env=settings,
    )
    yield up
    up.end()


@pytest.fixture(scope="session")
def yielding(up: Up) -> Iterator[RoundClient]:
    """What asks `up`."""
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=up.base_url, timeout=120, limits=limits, trust_env=False) as http:
        yield RoundClient(http, up.log)
