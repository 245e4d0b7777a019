"""Logprobs of answers are made into vLLM's objects when they are handed over, not when the engine
tells them: an object for each of twenty numbers of each token, of all answers of a step, held up
the event loop while the next step's came.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from workers.vllm.release import answers

# Tokens before one that vLLM looks at for its text: more than a character has bytes.
_CONTEXT = 4


class Late:
    """One position of an answer, as the engine has told it."""

    __slots__ = ("before", "ids", "logprobs", "plain", "rank")

    def __init__(self, plain: Any, before: tuple[int, ...], row: tuple[Any, Any, Any]) -> None:
        """`plain`: vLLM's processor of the answer, without logprobs. `before`: tokens."""
        self.plain, self.before = plain, before
        # Copies: what came lies in a message that has those of all answers.
        self.ids, self.logprobs, self.rank = row[0].copy(), row[1].copy(), int(row[2])


def keep_late(processor: Any, request: Any) -> None:
    """The answer to this request, which the output processor has just begun, keeps the numbers,
    and those of its prompt."""
    state = processor.request_states[request.request_id]
    found = state.logprobs_processor
    plain = of_prompt = None
    if isinstance(found.logprobs, list) and request.sampling_params.logprob_token_ids is None:
        plain = copy.copy(found)
        plain.logprobs = []
    if isinstance(found.prompt_logprobs, list):
        of_prompt = copy.copy(found)
        of_prompt.logprobs, of_prompt.cumulative_logprob = [], 0.0
        of_prompt.num_logprobs = found.num_prompt_logprobs
    if plain or of_prompt:
        # No circle: an answer's numbers are gone with it.
        forgets = answers.hands_over_each_step(state)
        found.update_from_output = partial(_keep, weakref.proxy(found), plain, of_prompt, forgets)


def _keep(processor: Any, plain: Any, of_prompt: Any, forgets: bool, output: Any) -> None:
    """In place of vLLM's. `forgets`: all earlier positions have been handed over. Kept, those of
    forty long streams were so many objects that the collector of garbage held up the event loop for
    0.2 s at a time.
    """
    told = prompts = None
    if plain is not None:
        told, output.new_logprobs = output.new_logprobs, None
    if of_prompt is not None:
        prompts = output.new_prompt_logprobs_tensors
        output.new_prompt_logprobs_tensors = None
    type(plain or of_prompt).update_from_output(processor, output)  # what is not kept
    if prompts is not None:
        rows = zip(*(one.numpy() for one in prompts[:3]), strict=True)
        _append(processor.prompt_logprobs, of_prompt, rows)
    if forgets and plain is not None:
        del processor.logprobs[:-_CONTEXT]
    if told is not None:
        _append(processor.logprobs, plain, zip(*told[:3], strict=True))
        processor.cumulative_logprob += sum(float(logprobs[0]) for logprobs in told[1])


def _append(kept: list[Any], plain: Any, rows: Iterable[tuple[Any, Any, Any]]) -> None:
    """A row is as wide as the widest that any answer of the step asks for."""
    width = plain.num_logprobs + 1 or None
    for ids, logprobs, rank in rows:
        before = tuple(int(one.ids[0]) for one in kept[-_CONTEXT:] if one is not None)
        kept.append(Late(plain, before, (ids[:width], logprobs[:width], rank)))


def made(logprobs: Sequence[Any]) -> Sequence[Any]:
    """vLLM's objects for positions that follow each other; others are returned as they are. The
    first one of a prompt has none."""
    if logprobs and logprobs[0] is None:
        return [None, *made(logprobs[1:])]
    if not logprobs or not isinstance(logprobs[0], Late):
        return logprobs
    first: Late = logprobs[0]
    processor = copy.copy(first.plain)
    processor.logprobs = [{token: None} for token in first.before]
    rows = answers.Rows(
        np.stack([one.ids for one in logprobs]),
        np.stack([one.logprobs for one in logprobs]),
        np.array([one.rank for one in logprobs]),
    )
    processor.update_from_output(answers.told("", [], rows))
    found: list[Any] = processor.logprobs[len(first.before) :]
    return found
