"""What vLLM is started with, as far as it can be seen without it."""

import os

import pytest

from poc_core.errors import ProoflineError
from workers.engines.options import EngineOptions
from workers.vllm import engine, lifeline


def test_finding_13_vllms_paths_for_developers_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run any method of the workers for whoever asks."""
    seen: list[str | None] = []

    async def start(*_args: object) -> None:
        seen.append(os.environ.get("VLLM_SERVER_DEV_MODE"))
        raise ProoflineError("This is enough.")

    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS", lifeline.VARIABLE):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # to be as it was after the test
    with pytest.raises(ProoflineError, match="This is enough"):
        engine.VllmEngine(EngineOptions(model="m"), rpc_timeout_s=1)
    assert seen == [None]
