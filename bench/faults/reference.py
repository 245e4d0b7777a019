"""The right artifacts of a campaign, computed by one single-threaded engine per core.

The model is so small that two threads per operation are slower than one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import numpy as np
import torch

from bench.faults.work import Artifacts
from bench.harness.node import K_DIM
from poc_core.records import ProofSpec
from poc_core.schemes.artifact.encoding import decode_vector
from workers.engines.base import Engine
from workers.pipeline import compute_all

# Largest L2 distance of one nonce's float32 vectors from other engines or other micro-batches.
TOLERANCE = 0.003
# Nonces of a forward pass, so few that the tensors stay in a core's cache.
_BATCH = 32


class Reference:
    """The engines, as a context manager. `artifacts` is thread-safe."""

    def __init__(self, load: Callable[[], Engine], n_engines: int | None = None) -> None:
        """`load` returns an engine. `n_engines`: by default one per core."""
        self._engines = [load() for _ in range(n_engines or len(os.sched_getaffinity(0)))]
        self._idle: SimpleQueue[Engine] = SimpleQueue()
        for engine in self._engines:
            self._idle.put(engine)
        # torch keeps this setting per thread.
        one_each = partial(torch.set_num_threads, 1)
        self._pool = ThreadPoolExecutor(len(self._engines), "reference", initializer=one_each)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for engine in self._engines:
            engine.close()

    def artifacts(self, block_hash: str, nonces: Sequence[int]) -> Artifacts:
        """Returns the artifacts of the nonces, in their order."""
        spec = ProofSpec(
            block_hash=block_hash,
            public_key="key",
            seq_len=64,
            options={"k_dim": K_DIM, "stronger_rng": False},
        )
        parts = [nonces[start : start + _BATCH] for start in range(0, len(nonces), _BATCH)]
        found = self._pool.map(partial(self._compute, spec), parts)
        return [artifact for artifacts in found for artifact in artifacts]

    def _compute(self, spec: ProofSpec, nonces: Sequence[int]) -> Artifacts:
        engine = self._idle.get()
        try:
            values = compute_all(engine, spec, nonces)
        finally:
            self._idle.put(engine)
        return [
            {"nonce": nonce, "vector_b64": value}
            for nonce, value in zip(nonces, values, strict=True)
        ]


def same_artifacts(found: Artifacts, expected: Artifacts) -> bool:
    """Returns whether both have the same nonces and, within TOLERANCE, the same vectors."""
    if [one["nonce"] for one in found] != [one["nonce"] for one in expected]:
        return False
    if found == expected:
        return True
    vectors = [
        np.stack([decode_vector(one["vector_b64"], K_DIM) for one in some])
        for some in (found, expected)
    ]
    return bool(np.linalg.norm(vectors[0] - vectors[1], axis=1).max() <= TOLERANCE)
