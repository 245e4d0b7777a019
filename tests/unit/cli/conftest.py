"""An engine in the place of the one that a command would load into its own process."""

from collections.abc import Callable
from typing import Any

import pytest

import workers.engines
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
