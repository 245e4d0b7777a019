"""What a freshly loaded engine has to show: slices that change nothing, and a micro-batch as large as it may get."""

from __future__ import annotations

import dataclasses
import logging

from poc_core.records import ProofSpec
from workers.engines.base import Engine, EngineMemoryError, Slice, Tick
from workers.slice_plan import SlicePlan

logger = logging.getLogger(__name__)

# Tokens of a nonce in the trials.
_SHORT = 8
_LONG = 1024


def prove_slices(engine: Engine) -> None:
    """Runs a small micro-batch whole and layer by layer; values that differ by a bit end the slicing of this model."""
    spec = _spec(min(_SHORT, engine.info.max_seq_len, engine.info.max_batch_tokens))
    nonces = range(engine.info.max_batch(spec.seq_len))[:2]
    whole = engine.compute(spec, nonces)
    if not engine.sliceable or engine.compute(spec, nonces, SlicePlan(0.0, 1)) != whole:
        engine.sliceable = False
        logger.warning(
            "the layers of %s cannot be run one by one: chat waits for whole micro-batches of proofs", engine.info.name
        )


def prove_budget(engine: Engine, whole: bool) -> None:
    """Runs one micro-batch of as many tokens as the engine may be given; halves that until the memory suffices.

    `whole`: through all layers, else through the first one, which needs as much memory. EngineMemoryError: not even one
    nonce fits.
    """
    spec = _spec(min(_LONG, engine.info.max_seq_len, engine.info.max_batch_tokens))
    asked = engine.info.max_batch_tokens
    if whole:
        # Layer by layer: memory that is short between two pipeline stages would lose the engine.
        engine.compute(spec, range(engine.info.max_batch(spec.seq_len)), SlicePlan(0.0, 1))
    else:
        _prove_first_layer(engine, spec)
    found = engine.info.max_batch_tokens
    if found < asked:
        logger.warning("micro-batches hold %d tokens: there is no memory for the %d that were asked for", found, asked)


def _prove_first_layer(engine: Engine, spec: ProofSpec) -> None:
    while True:
        n = engine.info.max_batch(spec.seq_len)
        try:
            engine.tick(
                Tick([(0, spec, range(n))], [Slice(0, 0, 1 if engine.sliceable else engine.stages[0].stop)], wait=True)
            )
            engine.tick(Tick(drop=[0]))
            return
        except EngineMemoryError:
            if n == 1:
                raise
            engine.info = dataclasses.replace(engine.info, max_batch_tokens=n // 2 * spec.seq_len)


def _spec(seq_len: int) -> ProofSpec:
    return ProofSpec(block_hash="warm-up", public_key="warm-up", seq_len=seq_len, options={})
