"""Checks of every model on a real engine: caches, slices, a second opinion, chat during proofs."""

import asyncio
import itertools
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from pydantic import JsonValue

from bench.families.differences import Answer, Difference, of_answers, of_values
from poc_core.records import ProofSpec
from tests.harness import golden
from workers.engines.base import Engine, MicroBatch, Slice, Tick
from workers.pipeline import compute_all
from workers.slice_plan import SlicePlan

# Longer than the families' windows and blocks.
SPEC = ProofSpec(block_hash="block", public_key="key", seq_len=200)
NONCES = range(5)
# Tokens of chat's prompt and of its answer.
PROMPT, ANSWER = 300, 8
# Equal runs, which show how much an engine's results vary.
_REPEATS = 4
# Ids of the micro-batches that run during chat, which a pipeline does not use.
FIRST_ID = 1_000_000
_IDS = itertools.count(FIRST_ID)
_TIMEOUT_S = 120


def shared_against_private(engine: Any, spec: ProofSpec = SPEC) -> Difference:
    """Compares artifacts with caches that layers share to those with a cache for each layer."""
    private = engine.info.caches == "private"
    engine.settle(private=False, replicated=True)
    shared = compute_all(engine, spec, NONCES)
    engine.settle(private=True, replicated=True)
    found = _against_repeats(engine, spec, shared)
    engine.settle(private=private, replicated=True)
    return found


def slices_against_whole(engine: Engine, spec: ProofSpec = SPEC) -> Difference:
    """Compares artifacts of layers that run one by one to those of one forward pass."""
    return _against_repeats(engine, spec, compute_all(engine, spec, NONCES, SlicePlan(0.0, 1)))


def _against_repeats(engine: Engine, spec: ProofSpec, seen: Sequence[JsonValue]) -> Difference:
    """Compares values to those of a whole micro-batch, and such micro-batches to each other."""
    expected = compute_all(engine, spec, NONCES)
    return _told(engine, spec, expected, of_values(seen, expected))


def _told(
    engine: Engine, spec: ProofSpec, expected: Sequence[JsonValue], seen: float
) -> Difference:
    """Returns the difference, with the variation of the engine's results if it is not 0."""
    if seen == 0.0:
        return Difference(0.0, 0.0)
    return Difference(
        seen, max(of_values(compute_all(engine, spec, NONCES), expected) for _ in range(_REPEATS))
    )


def against(engine: Engine, other: Engine) -> np.ndarray:
    """Returns the L2 distances between the artifacts of two engines."""
    return golden.l2(compute_all(engine, SPEC, NONCES), compute_all(other, SPEC, NONCES), 12)


def chat_beside_proofs(
    engine: Engine, spec: ProofSpec = SPEC, prompt: int = PROMPT
) -> dict[str, Difference]:
    """Compares greedy answers and proofs that run together with those that run alone.

    "chat": the answers, between any two slices of proofs, and one during whose steps proofs run;
    "beside chat": the proofs' values.
    """
    expected, alone = compute_all(engine, spec, NONCES), answered(engine, prompt)
    values, answers = _beside(engine, spec, prompt)
    apart = max(of_values(one, expected) for one in values)
    if all(answer == alone for answer in answers):
        return {"chat": Difference(0.0, 0.0), "beside chat": _told(engine, spec, expected, apart)}
    # Log probabilities measure the difference. vLLM compiles code for the first of them.
    once = max(of_answers(one, alone) for one in answers)
    alone, *others = [answered(engine, prompt, logprobs=True) for _ in range(1 + _REPEATS)]
    more, answers = _beside(engine, spec, prompt, logprobs=True)
    apart = max(apart, *(of_values(one, expected) for one in more))
    seen, again = (max(of_answers(one, alone) for one in those) for those in (answers, others))
    chat = Difference(seen or once, again)
    return {"chat": chat, "beside chat": _told(engine, spec, expected, apart)}


def _beside(
    engine: Engine, spec: ProofSpec, prompt: int, logprobs: bool = False
) -> tuple[list[Sequence[JsonValue]], list[Answer]]:
    """Runs proofs and chat together; returns the values and the answers."""
    values: list[Sequence[JsonValue]] = []
    answers: list[Answer] = []
    # A wrong cache or buffer would mix these values with the spec's.
    others = spec.model_copy(update={"block_hash": "other"})
    compute_all(engine, others, NONCES)
    for one in slices_of_one(engine, spec):
        values += [] if one is None else [one]
        answers.append(answered(engine, prompt, logprobs=logprobs))
    under_way = ask(engine, prompt, logprobs=logprobs)
    while not under_way.done():
        values += [one for one in slices_of_one(engine, spec) if one is not None]
        compute_all(engine, others, NONCES)
    answers.append(under_way.result(_TIMEOUT_S))
    return values, answers


def slices_of_one(engine: Engine, spec: ProofSpec) -> Iterator[Sequence[JsonValue] | None]:
    """Runs a micro-batch layer by layer if possible; yields None, and the values at the end."""
    own = next(_IDS)
    for stage in engine.stages:
        for first in stage if engine.sliceable else [stage.start]:
            begin = [MicroBatch(spec, NONCES, id=own)] if first == 0 else []
            end = first + 1 if engine.sliceable else stage.stop
            yield engine.tick(Tick(begin, [Slice(own, first, end)], wait=True)).values.get(own)


def greedy(engine: Engine, n_tokens: int = ANSWER) -> list[int]:
    """Returns the tokens of an answer to an uncached prompt of several blocks."""
    return answered(engine, n_tokens=n_tokens).tokens


def answered(
    engine: Engine, prompt: int = PROMPT, n_tokens: int = ANSWER, logprobs: bool = False
) -> Answer:
    """Returns the answer to an uncached prompt of `prompt` tokens."""
    return ask(engine, prompt, n_tokens, logprobs).result(_TIMEOUT_S)


def ask(
    engine: Any,
    prompt: int = PROMPT,
    n_tokens: int = ANSWER,
    logprobs: bool = False,
    salt: str = "",
) -> "Future[Answer]":
    """Sends a greedy request. `salt`: of the prompt in the prefix cache; empty for a new one."""
    from vllm import SamplingParams

    name = uuid.uuid4().hex
    tokens = [index % 50 + 10 for index in range(prompt)]
    request = {"prompt_token_ids": tokens, "cache_salt": salt or name}
    sampling = SamplingParams(
        temperature=0, max_tokens=n_tokens, ignore_eos=True, logprobs=0 if logprobs else None
    )

    async def answer() -> Answer:
        last = [output async for output in engine._llm.generate(request, sampling, name)][-1]
        said = last.outputs[0]
        tokens = list(said.token_ids)
        steps = zip(tokens, said.logprobs or (), strict=bool(said.logprobs))
        logprobs = [float(step[token].logprob) for token, step in steps]
        return Answer(tokens, logprobs, last.num_cached_tokens or 0)

    return asyncio.run_coroutine_threadsafe(answer(), engine._loop)
