"""What must hold of every model on a real engine: caches, slices, a second opinion, and chat beside proofs."""

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import JsonValue

from poc_core.records import ProofSpec
from tests import golden
from workers.engines.base import Begin, Engine, Slice, Tick
from workers.slice_plan import SlicePlan

# Longer than the families' windows and blocks.
SPEC = ProofSpec(block_hash="block", public_key="key", seq_len=200)
NONCES = range(5)


def shared_against_private(engine: Any) -> bool:
    """Whether values with caches that layers share are those with a cache for each layer, bit for bit."""
    private = engine.info.caches == "private"
    engine.settle(private=False, replicated=True)
    shared = engine.compute(SPEC, NONCES)
    engine.settle(private=True, replicated=True)
    alone = engine.compute(SPEC, NONCES)
    engine.settle(private=private, replicated=True)
    return bool(shared == alone)


def slices_against_whole(engine: Engine) -> bool:
    """Whether values of layers run one by one are those of all in one go, bit for bit."""
    return engine.compute(SPEC, NONCES, SlicePlan(0.0, 1)) == engine.compute(SPEC, NONCES)


def batch_against_alone(engine: Engine) -> np.ndarray:
    """L2 of artifacts of a batch from those of batches of one."""
    return golden.l2(engine.compute(SPEC, NONCES), [engine.compute(SPEC, [nonce])[0] for nonce in NONCES], 12)


def against(engine: Engine, other: Engine, spec: ProofSpec = SPEC) -> np.ndarray:
    """L2 of the artifacts of two engines."""
    return golden.l2(engine.compute(spec, NONCES), other.compute(spec, NONCES), 12)


def chat_between_slices(engine: Engine) -> bool:
    """Whether a greedy answer between any two slices of a proof is the one without proofs, and the proof's values too
    are those without chat."""
    expected, alone = engine.compute(SPEC, NONCES), greedy(engine)
    engine.compute(SPEC.model_copy(update={"block_hash": "other"}), NONCES)
    flight, answers = 1_000_000, []
    values: dict[int, Sequence[JsonValue]] = {}
    for stage in engine.stages:
        for first in stage if engine.sliceable else [stage.start]:
            begin = [Begin(flight, SPEC, NONCES)] if first == 0 else []
            end = first + 1 if engine.sliceable else stage.stop
            values |= engine.tick(Tick(begin, [Slice(flight, first, end)], wait=True)).values
            answers.append(greedy(engine))
    return values == {flight: expected} and all(answer == alone for answer in answers)


def greedy(engine: Engine, n_tokens: int = 8) -> list[int]:
    """Tokens of an answer that the engine gives to a prompt of several blocks, which it has not cached."""
    from vllm import SamplingParams

    llm, name = engine._llm, uuid.uuid4().hex  # type: ignore[attr-defined]
    prompt = {"prompt_token_ids": [index % 50 + 10 for index in range(300)], "cache_salt": name}
    sampling = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)

    async def answer() -> Sequence[int]:
        last = [output async for output in llm.generate(prompt, sampling, name)][-1]
        return list(last.outputs[0].token_ids)

    return list(engine._await(answer(), 120))  # type: ignore[attr-defined]
