"""Chat requests take turns: the event loop runs other requests between two steps."""

import asyncio
import gc
import weakref
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.marks import needs_vllm
from tests.planted.fair_chat import N_BEST, TEXT, Llm, answer, begun, installed, params, step, told
from workers.vllm.chat.fields import CLIENT

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("ids", [True, False], ids=["ids", "text"])
async def test_logprobs_are_vllms_own(tokenizer: Any, streams: bool, ids: bool) -> None:
    expected = await told(tokenizer, streams, ids, is_fair=False)
    assert await told(tokenizer, streams, ids, is_fair=True) == expected
    text, _, positions, _ = expected
    assert text == TEXT
    assert {len(one) for one in positions} == {N_BEST + 1}
    if not ids:
        names = [next(iter(one.values())).decoded_token for one in positions]
        assert "" in names  # of characters that are not whole yet


async def steps_left(tokenizer: Any, told_before_s: float) -> list[int]:
    """Of a hundred steps those that are not taken yet, whenever others have the loop."""
    names = [f"{number}" for number in range(40)]
    llm = Llm(tokenizer, [step(dict.fromkeys(names, 300), False) for _ in range(100)])
    llm.engine_core.told_before_s = told_before_s
    installed(llm)
    CLIENT.set("greedy")
    asking = [asyncio.create_task(answer(llm, params(True), name)) for name in names]
    await asyncio.sleep(0)
    handler = llm.handle_outputs()
    left = []
    while not llm.engine_core.all_taken.is_set():
        await asyncio.sleep(0)
        left.append(len(llm.engine_core.steps))
    for task in (handler, *asking):
        task.cancel()
    return left


@pytest.mark.promise(
    "a chat user with many streams",
    "does not block the worker's server, however fast the engine is",
)
async def test_between_two_steps_others_have_the_loop(tokenizer: Any) -> None:
    # told in the future, so that none is late on any machine
    assert set(range(1, 100)) <= set(await steps_left(tokenizer, told_before_s=-3600))


@pytest.mark.promise(
    "a chat user with many streams",
    "does not block the worker's server, however fast the engine is",
)
async def test_what_the_core_told_long_ago_goes_before_others_for_some_steps(
    tokenizer: Any,
) -> None:
    left = await steps_left(tokenizer, told_before_s=3600)
    taken = [before - after for before, after in pairwise([100, *left]) if before > after]
    assert set(taken[1:-1]) == {8}


@pytest.mark.promise(
    "a chat user with many streams",
    "does not block the worker's server, however fast the engine is",
)
async def test_who_asks_for_little_is_answered_before_what_waits_of_others(tokenizer: Any) -> None:
    greedy = [f"{number}" for number in range(40)]
    steps = [step(dict.fromkeys([*greedy, "modest"], 300), n == 15, 21) for n in range(16)]
    llm = Llm(tokenizer, steps)
    installed(llm)
    taken = 0

    async def stream(name: str) -> None:
        nonlocal taken
        CLIENT.set("greedy")
        async for one in llm.generate({}, params(True, n_best=20), name):
            taken += len(one.outputs[0].token_ids)

    asking = [asyncio.create_task(stream(name)) for name in greedy]
    modest = asyncio.create_task(answer(llm, params(False), "modest"))
    await asyncio.sleep(0)
    handler = llm.handle_outputs()
    ((whole,),) = [one.outputs for one in await asyncio.wait_for(modest, 30)]
    assert len(whole.token_ids) == 16
    assert taken < 16 * 40 / 2
    await asyncio.wait_for(asyncio.gather(*asking), 30)
    assert taken == 16 * 40
    handler.cancel()


@pytest.mark.parametrize(("streams", "kept"), [(True, 5), (False, 20)], ids=["stream", "whole"])
async def test_a_stream_keeps_no_numbers_that_were_handed_over(
    tokenizer: Any, streams: bool, kept: int
) -> None:
    """Kept, they made the collector of garbage hold up the loop for longer and longer."""
    llm = Llm(tokenizer, [step({"a": 300 + n}, False) for n in range(20)])
    installed(llm)
    asking = asyncio.create_task(answer(llm, params(streams), "a"))
    await asyncio.sleep(0)
    handler = llm.handle_outputs()
    await asyncio.wait_for(llm.engine_core.all_taken.wait(), 30)
    assert len(llm.output_processor.request_states["a"].logprobs_processor.logprobs) == kept
    handler.cancel()
    asking.cancel()


async def test_an_answers_numbers_are_gone_with_it(tokenizer: Any) -> None:
    llm = Llm(tokenizer, [step({"a": 300}, False), step({"a": 301}, True)])
    installed(llm)
    asking = asyncio.create_task(answer(llm, params(True), "a"))
    await asyncio.sleep(0)
    left = weakref.ref(llm.output_processor.request_states["a"].logprobs_processor)
    gc.disable()
    try:
        handler = llm.handle_outputs()
        await asyncio.wait_for(asking, 30)
        assert left() is None
    finally:
        gc.enable()
    handler.cancel()


async def test_answers_with_many_logprobs_wait_for_a_place_while_others_ask(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.vllm.chat import wide_answers

    llm = Llm(tokenizer, [])
    installed(llm)
    states = llm.output_processor.request_states
    alone = [await begun(llm, f"alone {n}", params(True, n_best=20)) for n in range(12)]
    assert len(states) == 12, "nobody else asks"
    for task in alone:
        task.cancel()
    await asyncio.gather(*alone, return_exceptions=True)
    states.clear()  # as vLLM does of answers that are aborted

    usual = await begun(llm, "usual", params(True, n_best=wide_answers.USUAL))
    CLIENT.set("greedy")
    greedy = [await begun(llm, f"greedy {n}", params(True, n_best=20)) for n in range(12)]
    assert len(states) == 1 + wide_answers.MOST
    CLIENT.set("modest")
    modest = await begun(llm, "modest", params(True, n_best=20))
    CLIENT.set("usual")
    others = [await begun(llm, f"other {n}", params(True)) for n in range(20)]
    assert len(states) == 21 + wide_answers.MOST, "the usual ones wait for nobody"

    greedy[-1].cancel()  # which waits
    greedy[0].cancel()  # which is under way
    await asyncio.gather(greedy[0], greedy[-1], return_exceptions=True)
    del states["greedy 0"]
    await begun(llm, "one more", params(True))
    assert "modest" in states, "who had least is next"
    assert "greedy 8" not in states

    for task in (usual, *others):
        task.cancel()
    await asyncio.gather(usual, *others, return_exceptions=True)
    for name in [one for one in states if not one.startswith(("greedy", "modest"))]:
        del states[name]
    monkeypatch.setattr(wide_answers, "CALM_S", 0.0)
    async with asyncio.timeout(30):
        while not {"greedy 8", "greedy 9", "greedy 10"} <= set(states):  # all others are gone
            await asyncio.sleep(0.05)
    for task in (modest, *greedy):
        task.cancel()


class Handler:
    """Formats as vLLM's handlers of chats do; notes how many positions at a time."""

    def __init__(self) -> None:
        self.at_once: list[int] = []

    def _create_chat_logprobs(self, token_ids: Any, top_logprobs: Any, **named: Any) -> Any:
        assert len(token_ids) == len(top_logprobs)
        self.at_once.append(len(token_ids))
        assert named == {"num_output_top_logprobs": 20}
        return SimpleNamespace(content=[*zip(token_ids, top_logprobs, strict=True)])

    def formatted(self, n: int) -> Any:
        numbers = list(range(n))
        return self._create_chat_logprobs(
            token_ids=numbers, top_logprobs=numbers, num_output_top_logprobs=20
        )

    async def chat_completion_full_generator(self, n_choices: int) -> Any:
        await asyncio.sleep(0)
        return [self.formatted(100) for _ in range(n_choices)]


async def test_whole_answers_are_formatted_in_turns(tokenizer: Any) -> None:
    handler = Handler()
    fair = installed(Llm(tokenizer, [])).fair
    state = SimpleNamespace(_state={"chat": handler, "again": handler, "args": None})
    fair.format_in_turns(SimpleNamespace(state=state))
    making = asyncio.create_task(handler.chat_completion_full_generator(3))
    rounds = 0
    while not making.done():
        await asyncio.sleep(0)
        rounds += 1
    numbers = [(n, n) for n in range(100)]
    assert [one.content for one in making.result()] == [numbers] * 3
    assert max(handler.at_once) * 22 <= 128
    assert rounds > 50
    # A stream's part, which has had its turn, comes at once.
    assert handler.formatted(100).content == numbers
