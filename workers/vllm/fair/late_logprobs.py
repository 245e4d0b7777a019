"""Logprobs of answers are made into vLLM's objects when they are handed over, not when the engine
tells them: an object for each of twenty numbers of each token, of all answers of a step, held up
the event loop while the next step's came.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from workers.vllm.chat import compat

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
    """The answer to this request, which the output processor has just begun, keeps the numbers."""
    state = processor.request_states[request.request_id]
    found = state.logprobs_processor
    if isinstance(found.logprobs, list) and request.sampling_params.logprob_token_ids is None:
        plain = copy.copy(found)
        plain.logprobs = []
        # No circle: an answer's numbers are gone with it.
        forgets = compat.hands_over_each_step(state)
        found.update_from_output = partial(_keep, weakref.proxy(found), plain, forgets)


def _keep(processor: Any, plain: Any, forgets: bool, output: Any) -> None:
    """In place of vLLM's. A row is as wide as the widest that any answer of the step asks for.

    `forgets`: all earlier positions have been handed over. Kept, those of forty long streams were
    so many objects that the collector of garbage held up the event loop for 0.2 s at a time.
    """
    told, output.new_logprobs = output.new_logprobs, None
    type(plain).update_from_output(processor, output)  # the prompt's
    if forgets:
        del processor.logprobs[:-_CONTEXT]
    width = processor.num_logprobs + 1 or None
    for ids, logprobs, rank in zip(*told[:3], strict=True) if told else ():
        before = tuple(int(one.ids[0]) for one in processor.logprobs[-_CONTEXT:])
        processor.logprobs.append(Late(plain, before, (ids[:width], logprobs[:width], rank)))
        processor.cumulative_logprob += float(logprobs[0])


def made(logprobs: Sequence[Any]) -> Sequence[Any]:
    """vLLM's objects for positions that follow each other; others are returned as they are."""
    if not logprobs or not isinstance(logprobs[0], Late):
        return logprobs
    first: Late = logprobs[0]
    processor = copy.copy(first.plain)
    processor.logprobs = [{token: None} for token in first.before]
    rows = compat.Rows(
        np.stack([one.ids for one in logprobs]),
        np.stack([one.logprobs for one in logprobs]),
        np.array([one.rank for one in logprobs]),
    )
    processor.update_from_output(compat.told("", [], rows))
    found: list[Any] = processor.logprobs[len(first.before) :]
    return found
