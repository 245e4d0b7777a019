"""Logprobs of answers are made into vLLM's objects when they are handed over, not when the engine
tells them: an object for each of twenty numbers of each token, of all answers of a step, held up
the event loop while the next step's came.

Import it only inside a process that has vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

# Tokens before one that vLLM looks at for its text: more than a character has bytes.
_CONTEXT = 4


class Late:
    """One position of an answer, as the engine has told it."""

    __slots__ = ("ids", "index", "logprobs", "processor", "rank")

    def __init__(self, processor: Any, ids: np.ndarray, logprobs: np.ndarray, rank: int) -> None:
        # Copies: what came lies in a message that has those of all answers.
        self.ids, self.logprobs, self.rank = ids.copy(), logprobs.copy(), rank
        self.processor, self.index = processor, len(processor.logprobs)


def keep_late(processor: Any, request: Any) -> None:
    """The answer to this request, which the output processor has just begun, keeps the numbers."""
    found = processor.request_states[request.request_id].logprobs_processor
    if isinstance(found.logprobs, list) and request.sampling_params.logprob_token_ids is None:
        found.update_from_output = partial(_keep, found)


def _keep(processor: Any, output: Any) -> None:
    """In place of vLLM's. A row is as wide as the widest that any answer of the step asks for."""
    told, output.new_logprobs = output.new_logprobs, None
    type(processor).update_from_output(processor, output)  # the prompt's
    width = processor.num_logprobs + 1 or None
    for ids, logprobs, rank in zip(*told[:3], strict=True) if told else ():
        processor.logprobs.append(Late(processor, ids[:width], logprobs[:width], int(rank)))
        processor.cumulative_logprob += float(logprobs[0])


def made(logprobs: Sequence[Any]) -> Sequence[Any]:
    """vLLM's objects for positions that follow each other; others are returned as they are."""
    if not logprobs or not isinstance(logprobs[0], Late):
        return logprobs
    first: Late = logprobs[0]
    scratch = copy.copy(first.processor)
    before = scratch.logprobs[max(0, first.index - _CONTEXT) : first.index]
    scratch.logprobs = [{int(one.ids[0]): None} for one in before]
    rows = [np.stack([getattr(one, name) for one in logprobs]) for name in ("ids", "logprobs")]
    ranks = np.array([one.rank for one in logprobs])
    told = EngineCoreOutput("", [], new_logprobs=LogprobsLists(*rows, ranks))
    type(scratch).update_from_output(scratch, told)
    found: list[Any] = scratch.logprobs[len(before) :]
    return found
