"""Errors of the transformers engine, without a model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from poc_core.records import ModelInfo, ProofSpec
from workers.engines.base import EngineLostError, EngineMemoryError, MicroBatch, Tick
from workers.engines.transformers import TransformersEngine


class Failing(TransformersEngine):
    """An engine whose forward pass raises `error`."""

    def __init__(self, error: Exception) -> None:
        self.info = ModelInfo("failing", 256, 4, 64, 256, "bfloat16")
        scheme = SimpleNamespace(begin=lambda _nonces, reflected: None)
        self._schemes = cast(Any, SimpleNamespace(of=lambda _spec: scheme))
        self._error = error

    def _run(self, batch: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nOf 139 GiB"), EngineMemoryError),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), EngineMemoryError),
        (MemoryError(), EngineMemoryError),
        (torch.AcceleratorError("an illegal memory access"), EngineLostError),
        (RuntimeError("bad shape"), RuntimeError),
    ],
    ids=["GPU", "CPU", "Python", "a broken GPU", "another error"],
)
def test_short_memory_is_told_apart_on_a_cpu_too(
    error: Exception, becomes: type[Exception]
) -> None:
    spec = ProofSpec(block_hash="b", public_key="k", seq_len=4)
    with pytest.raises(becomes):
        Failing(error).tick(Tick([MicroBatch(spec, range(1), id=0)]))
