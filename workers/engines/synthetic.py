"""An engine for load tests only. It has no model, and no verifier accepts its numbers."""

import time
from collections.abc import Sequence

from pydantic import JsonValue

from poc_core import records
from poc_core.schemes.contract import contract_of
from workers.engines.base import WholeBatchEngine
from workers.engines.options import EngineOptions

# Limits wide enough for any load test.
_HIDDEN_SIZE = 4096
_MAX_TOKENS = 1 << 20
# Nonces of a micro-batch, equal to the default batch size of clients.
_MAX_SEQUENCES = 32


class SyntheticEngine(WholeBatchEngine):
    """An engine that only waits `synthetic_step_ms`. Its values depend on spec and nonce."""

    def __init__(self, options: EngineOptions) -> None:
        self._step_s = options.synthetic_step_ms / 1000
        self.info = records.ModelInfo(
            name=options.name,
            hidden_size=_HIDDEN_SIZE,
            n_layers=1,
            max_seq_len=_MAX_TOKENS,
            max_batch_tokens=options.max_batch_tokens or _MAX_TOKENS,
            dtype="synthetic",
            max_sequences=_MAX_SEQUENCES,
        )

    def compute_batch(self, spec: records.ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        end = time.monotonic() + self._step_s
        values = contract_of(spec.scheme).synthetic_values(spec, nonces, self.info.hidden_size)
        time.sleep(max(0.0, end - time.monotonic()))
        return values

    def close(self) -> None:
        pass
