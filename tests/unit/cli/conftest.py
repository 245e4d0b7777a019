"""Stand-ins: for the engine that a command would load into its own process, and for the hub."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import workers.engines
from tests.peers.hub import Hub
from workers.engines.base import Engine
from workers.engines.options import EngineOptions


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """To be called with the engine, which keeps as `options` what it was to be loaded with."""

    def put(engine: Any) -> None:
        def load(options: EngineOptions) -> Engine:
            engine.options = options
            loaded: Engine = engine
            return loaded

        monkeypatch.setattr(workers.engines, "load_engine", load)

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return put


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, beside an empty cache."""
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Hub() as running:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: HfApi(running.url, token=False))
        yield running
