"""For load tests only: no model, no proof. Takes a set time a batch; no verifier accepts its numbers."""

import hashlib
import time
from collections.abc import Sequence

import numpy as np
from pydantic import JsonValue

from poc_core.encoding import encode_vectors
from poc_core.errors import SpecError
from poc_core.records import ProofSpec
from workers.engines.base import Engine, ModelInfo
from workers.engines.options import EngineOptions

# Limits wide enough for any load test.
_HIDDEN_SIZE = 4096
_MAX_TOKENS = 1 << 20


class SyntheticEngine(Engine):
    """Sleeps `synthetic_step_ms` a call of `compute`, whatever its size; values follow from spec and nonce alone."""

    def __init__(self, options: EngineOptions) -> None:
        self._step_s = options.synthetic_step_ms / 1000
        self.info = ModelInfo(
            name=options.name,
            hidden_size=_HIDDEN_SIZE,
            n_layers=1,
            max_seq_len=_MAX_TOKENS,
            max_batch_tokens=_MAX_TOKENS,
            dtype="synthetic",
        )

    def compute(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        end = time.monotonic() + self._step_s
        self.micro_batches(spec, nonces)  # for its check of seq_len
        text = spec.model_dump_json()
        if spec.scheme == "artifact":
            k_dim = spec.options.get("k_dim", 12)
            if not isinstance(k_dim, int) or not 1 <= k_dim <= _HIDDEN_SIZE:
                raise SpecError(f"k_dim must be an integer from 1 to {_HIDDEN_SIZE}, not {k_dim!r}.")
            noise = np.stack([_noise(text, nonce, k_dim) for nonce in nonces]) if nonces else np.empty((0, k_dim))
            norms = np.linalg.norm(noise, axis=-1, keepdims=True)
            values: list[JsonValue] = list(encode_vectors(noise / (norms + 1e-8)))
        elif spec.scheme == "distance":
            # As wide as true distances spread: both sides of any r_target in use get some.
            values = [float(np.sqrt(2) + 0.03 * _noise(text, nonce, 1)[0]) for nonce in nonces]
        else:
            raise SpecError(f"The synthetic engine does not know the scheme {spec.scheme[:80]!r}.")
        time.sleep(max(0.0, end - time.monotonic()))
        return values

    def close(self) -> None:
        pass


def _noise(text: str, nonce: int, size: int) -> np.ndarray:
    """float64 (size,) in [-1, 1), from a hash of spec and nonce."""
    digest = hashlib.shake_128(f"synthetic|{text}|{nonce}".encode()).digest(2 * size)
    return np.frombuffer(digest, dtype="<i2") / 32768
