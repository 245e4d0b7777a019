"""Creates vLLM's logprob objects when an answer is delivered, not when the engine reports its
tokens. vLLM itself creates an object for each of twenty numbers per token, for all answers of a
step, and blocks the event loop while the next step's report waits.
"""

import copy
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from workers.vllm.release import answers

# Preceding tokens that vLLM needs for a token's text: a character has at most four bytes.
_CONTEXT = 4


class Late:
    """The logprobs of one position of an answer, as reported by the engine."""

    __slots__ = ("before", "ids", "logprobs", "plain", "rank")

    def __init__(self, plain: Any, before: tuple[int, ...], row: tuple[Any, Any, Any]) -> None:
        """`plain`: vLLM's logprobs processor without results. `before`: preceding tokens."""
        self.plain, self.before = plain, before
        # Copied, because the report's arrays hold the numbers of all answers.
        self.ids, self.logprobs, self.rank = row[0].copy(), row[1].copy(), int(row[2])


def keep_late(processor: Any, request: Any) -> None:
    """Makes a new answer keep its own and its prompt's logprobs as Late objects until delivery."""
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
        # No reference cycle: an answer's numbers are freed with the answer.
        forgets = answers.hands_over_each_step(state)
        found.update_from_output = partial(_keep, weakref.proxy(found), plain, of_prompt, forgets)


def _keep(processor: Any, plain: Any, of_prompt: Any, forgets: bool, output: Any) -> None:
    """Replaces vLLM's `update_from_output`: stores a report's logprobs as Late objects. `forgets`:
    True to drop delivered positions, because garbage collection of many objects blocks the loop.
    """
    told = prompts = None
    if plain is not None:
        told, output.new_logprobs = output.new_logprobs, None
    if of_prompt is not None:
        prompts = output.new_prompt_logprobs_tensors
        output.new_prompt_logprobs_tensors = None
    type(plain or of_prompt).update_from_output(processor, output)  # the rest of the report
    if prompts is not None:
        rows = zip(*(one.numpy() for one in prompts[:3]), strict=True)
        _append(processor.prompt_logprobs, of_prompt, rows)
    if forgets and plain is not None:
        del processor.logprobs[:-_CONTEXT]
    if told is not None:
        _append(processor.logprobs, plain, zip(*told[:3], strict=True))
        processor.cumulative_logprob += sum(float(logprobs[0]) for logprobs in told[1])


def _append(kept: list[Any], plain: Any, rows: Iterable[tuple[Any, Any, Any]]) -> None:
    """Appends Late objects to `kept`, cut to the number of logprobs that this answer requests."""
    width = plain.num_logprobs + 1 or None
    for ids, logprobs, rank in rows:
        before = tuple(int(one.ids[0]) for one in kept[-_CONTEXT:] if one is not None)
        kept.append(Late(plain, before, (ids[:width], logprobs[:width], rank)))


def made(logprobs: Sequence[Any]) -> Sequence[Any]:
    """Converts Late objects to vLLM's logprob objects. Keeps all other objects unchanged."""
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
    processor.update_from_output(answers.core_output("", [], rows))
    found: list[Any] = processor.logprobs[len(first.before) :]
    return found
