"""Logprobs of prompts."""

import asyncio
from typing import Any

import pytest

from tests.harness.marks import needs_vllm
from tests.planted.fair_chat import N_BEST, Llm, answer, begun, installed, params, step

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM


def with_prompt(step: Any, n_tokens: int, n_best: int) -> Any:
    """The step, whose answers' prompts it tells too."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    for output in step.outputs:
        output.new_prompt_logprobs_tensors = LogprobsTensors(
            torch.arange(n_tokens * (n_best + 1)).reshape(n_tokens, n_best + 1) % 512,
            -torch.ones(n_tokens, n_best + 1),
            torch.ones(n_tokens, dtype=torch.int64),
        )
    return step


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("n_best", [None, 2], ids=["prompt", "both"])
async def test_a_prompts_logprobs_are_vllms_own(
    tokenizer: Any, streams: bool, n_best: int | None
) -> None:
    found = []
    for is_fair in (False, True):
        how = params(streams, ids=False, n_best=N_BEST)
        how.logprobs, how.prompt_logprobs = n_best, 4
        llm = Llm(tokenizer, [])
        if is_fair:
            installed(llm)
        first = step({"a": 300}, False, 5)
        if n_best is None:
            for output in first.outputs:
                output.new_logprobs = None
        last = step({"a": 301}, True, 5)
        last.outputs[0].new_logprobs = first.outputs[0].new_logprobs
        llm.engine_core.steps = [with_prompt(first, 200, 4), last]
        asking = asyncio.create_task(answer(llm, how, "a"))
        await asyncio.sleep(0)
        handler = llm.handle_outputs()
        outputs = await asyncio.wait_for(asking, 30)
        handler.cancel()
        of_prompt = [row for one in outputs for row in one.prompt_logprobs or ()]
        own = [row for one in outputs for row in one.outputs[0].logprobs or ()]
        found.append((of_prompt, own))
    assert found[1] == found[0]
    assert len(of_prompt) == 201
    assert of_prompt[0] is None


async def test_prompts_with_logprobs_go_one_at_a_time_while_others_ask(tokenizer: Any) -> None:
    llm = Llm(tokenizer, [])
    installed(llm)
    states = llm.output_processor.request_states
    usual = await begun(llm, "usual", params(True))
    how = params(True)
    how.prompt_logprobs = 0
    prompts = [await begun(llm, f"prompt {n}", how) for n in range(3)]
    assert set(states) == {"usual", "prompt 0"}
    for task in (usual, *prompts):
        task.cancel()
