"""What is handed over of a stream: in parts, in order, however late it is taken."""

import asyncio
from typing import Any

import pytest

from tests.harness.marks import needs_vllm
from workers.vllm.chat.in_parts import Parts

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM


def output(*tokens: int, index: int = 0, finished: bool = False) -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    text = "".join(f"{token} " for token in tokens)
    logprobs: Any = [{token: None} for token in tokens]
    one = CompletionOutput(index, text, list(tokens), None, logprobs)
    return RequestOutput("a", None, [1], None, [one], finished)


@pytest.fixture
def queue() -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    found = RequestOutputCollector(RequestOutputKind.DELTA, "a")
    Parts(found.ready, 4).install(found)
    return found


async def test_what_waits_is_joined_up_to_a_part(queue: Any) -> None:
    for token in range(10):
        queue.put(output(token, finished=token == 9))
    parts = []
    while (part := queue.get_nowait()) is not None:
        parts.append(part)
    assert [list(part.outputs[0].token_ids) for part in parts] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert [part.finished for part in parts] == [False, False, True]
    assert "".join(part.outputs[0].text for part in parts) == "0 1 2 3 4 5 6 7 8 9 "


async def test_who_waits_gets_the_next_at_once(queue: Any) -> None:
    taken = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put(output(7))
    assert list((await taken).outputs[0].token_ids) == [7]
    assert queue.get_nowait() is None


async def test_answers_beside_each_other_keep_their_tokens(queue: Any) -> None:
    for token in range(3):
        for index in range(2):
            queue.put(output(token, index=index))
    found: dict[int, list[int]] = {0: [], 1: []}
    while (part := queue.get_nowait()) is not None:
        for one in part.outputs:
            found[one.index] += one.token_ids
    assert found == {0: [0, 1, 2], 1: [0, 1, 2]}


async def test_an_error_comes_behind_what_was_computed(queue: Any) -> None:
    queue.put(output(1))
    queue.put(RuntimeError("the engine died"))
    assert list((await queue.get()).outputs[0].token_ids) == [1]
    with pytest.raises(RuntimeError, match="the engine died"):
        await queue.get()


async def test_what_ends_a_stream_stays_by_itself(queue: Any) -> None:
    from vllm.outputs import STREAM_FINISHED

    queue.put(output(1))
    queue.put(STREAM_FINISHED)
    await queue.get()
    assert queue.get_nowait() is STREAM_FINISHED
