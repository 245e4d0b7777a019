"""Models on real vLLM engines in a test's own process, in the combinations that are tested."""

from typing import Any, NamedTuple

import pytest

from tests.harness import golden
from tests.harness.chat_client import vllm_args
from workers.engines.base import Engine
from workers.engines.options import EngineOptions
from workers.load import load_engine


class Deployment(NamedTuple):
    model: str
    dtype: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def start(self, *arguments: str, **options: Any) -> Engine:
        """`arguments`: further ones of `vllm serve`."""
        return load_engine(
            EngineOptions(
                served_model_name=self.model,
                # On a GPU too: compiling takes a minute a start, and proofs run no compiled code.
                vllm_args=("--enforce-eager", *vllm_args(), *arguments),
                decode_memory_gb=0.1,  # chat's cache is too small to take a share of
                **self._asdict() | {"model": golden.model_dir(self.model)} | options,
            )
        )


# Decode proofs need a hidden size of 256.
CHAINS = Deployment("tiny-qwen3-moe-256", "float32")
QWEN3 = Deployment("tiny-qwen3", "float32")
EXPERTS = Deployment("tiny-qwen3-moe", "float32", tensor_parallel=2)
PIPELINED = Deployment("tiny-llama", "float32", pipeline_parallel=2)


def further(*deployment: Any) -> Any:
    """A deployment whose model, dtype and parallelism others have, each in another combination."""
    return pytest.param(Deployment(*deployment), marks=pytest.mark.slow)


# The rest of `make test` loads some combinations, left to `make slow` here: compose's workers
# tiny-llama in float32 and tiny-qwen3 in bfloat16, `proofline compute` tiny-qwen3 over two ranks.
FLOAT32 = [
    QWEN3,
    EXPERTS,
    PIPELINED,
    further("tiny-llama", "float32"),
    further("tiny-qwen3-moe", "float32"),
    further("tiny-qwen3", "float32", 2),
    further("tiny-qwen3", "float32", 1, 2),
]
DECODE = [
    CHAINS,
    further("tiny-qwen3-256", "float32"),
    further("tiny-qwen3-moe-256", "float32", 2),
    further("tiny-qwen3-256", "float32", 2),
    further("tiny-qwen3-moe-256", "float32", 1, 2),
    further("tiny-qwen3-256", "float32", 1, 2),
]
DECODE_BFLOAT16 = [
    Deployment("tiny-qwen3-256", "bfloat16"),
    Deployment("tiny-qwen3-moe-256", "bfloat16"),
]
BFLOAT16 = [
    Deployment("tiny-llama", "bfloat16"),
    further("tiny-qwen3", "bfloat16"),
    further("tiny-qwen3", "bfloat16", 2),
]
