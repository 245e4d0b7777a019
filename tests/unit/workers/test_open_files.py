"""Each process of a node raises its limit of open files before it opens any."""

import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workers import main as worker
from workers.courier import main as courier
from workers.engines.options import EngineOptions
from workers.vllm.start import host_follower, host_link

OPTIONS = EngineOptions(model="m", engine="synthetic")


class Enough(Exception):
    """The process has begun."""


@pytest.fixture(autouse=True)
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("begin", "module", "next_step"),
    [
        (lambda: worker.run_worker(OPTIONS), worker, "load_settings"),
        (courier.run_courier, courier, "load_settings"),
        (lambda: host_follower.run_follower(OPTIONS), host_link, "join_head"),
    ],
    ids=["worker", "courier", "follower"],
)
def test_a_process_opens_as_many_files_as_it_is_let(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None], module: Any, next_step: str
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Enough

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, next_step, stop)
    with pytest.raises(Enough):
        begin()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
