"""What stands around vLLM's `generate`: the event loop is everybody's, and logprobs are vLLM's."""

import asyncio
import gc
import json
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cli.shipped import shipped_models
from tests.harness.marks import needs_vllm
from workers.vllm.chat.errors import BadRequest
from workers.vllm.chat.fields import CLIENT
from workers.vllm.release.extra_args import TOKEN_IDS

pytestmark = [pytest.mark.xdist_group("engines"), needs_vllm]  # whose process has loaded vLLM

N_BEST = 3
# "héllo" and characters of several tokens each, which have no text of their own.
TEXT = "héllo 🦜 世界 ok"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shipped_models()["tiny-qwen3"])


def installed(llm: Any) -> Any:
    """The steps of a chat around this engine."""
    from workers.vllm.chat.pipeline import ChatPipeline

    pipeline = ChatPipeline(llm, "")
    pipeline.install()
    return pipeline


class Core:
    """An engine core that has told all its steps before anybody asks."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps
        self.told_before_s = 0.0
        self.all_taken = asyncio.Event()

    async def get_output_async(self) -> Any:
        if not self.steps:
            self.all_taken.set()
            await asyncio.Event().wait()
        told = self.steps.pop(0)
        told.timestamp = time.monotonic() - self.told_before_s
        return told


class Llm:
    """What ChatPipeline needs of vLLM's AsyncLLM, with its own output processor and handler."""

    def __init__(self, tokenizer: Any, steps: list[Any]) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        self.output_processor = OutputProcessor(tokenizer, log_stats=False)
        self._begin = self.output_processor.add_request
        self.output_processor.add_request = self._begin_answer
        self.engine_core = Core(steps)
        self.vllm_config = SimpleNamespace(
            structured_outputs_config=SimpleNamespace(backend="none"),
            model_config=SimpleNamespace(
                skip_tokenizer_init=False,
                max_model_len=4096,
                logprobs_mode="processed_logprobs",
                logits_processors=None,
                get_vocab_size=lambda: 512,
            ),
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
            speculative_config=None,
        )
        self.log_stats, self.logger_manager, self.output_handler = False, None, None
        self.renderer = SimpleNamespace(mm_processor_cache=None)

    def _begin_answer(self, request: Any, *told: Any) -> None:
        """Names tokens as the pipeline does, also where that is not installed."""
        from workers.vllm.release import answers

        self._begin(request, *told)
        answers.shape_logprobs(self.output_processor, request)

    async def generate(self, _prompt: Any, params: Any, request_id: str) -> Any:
        from vllm.v1.engine.output_processor import RequestOutputCollector

        queue = RequestOutputCollector(params.output_kind, request_id)
        self.output_processor.add_request(asked(request_id, params), None, None, 0, queue)
        while True:
            output = await queue.get()
            yield output
            if output.finished:
                return

    def handle_outputs(self) -> asyncio.Task[None]:
        from vllm.v1.engine.async_llm import AsyncLLM

        AsyncLLM._run_output_handler(self)  # noqa: SLF001
        handler: Any = self.output_handler
        return handler  # type: ignore[no-any-return]


def asked(request_id: str, params: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequest

    request = EngineCoreRequest(request_id, [1, 2, 3], None, params, None, 0.0, None, None, None)
    request.external_req_id = request_id
    return request


def params(streams: bool, ids: bool = True, n_best: int = N_BEST) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    extra = {TOKEN_IDS: 1} if ids else None
    return SamplingParams(
        max_tokens=1000, logprobs=n_best, output_kind=kind, extra_args=extra, ignore_eos=True
    )


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


def step(tokens: dict[str, int], last: bool, width: int = N_BEST + 1) -> Any:
    """A step of the engine; its rows are as wide as the widest that any answer asks for."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists

    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[token],
                new_logprobs=LogprobsLists(
                    np.array([[token, *range(300, 300 + width - 1)]]),
                    np.array([[-3.0, *(-float(n + 1) for n in range(width - 1))]], np.float32),
                    np.array([9]),
                ),
                finish_reason=FinishReason.LENGTH if last else None,
            )
            for request_id, token in tokens.items()
        ]
    )


async def answer(llm: Any, how: Any, request_id: str) -> list[Any]:
    return [one async for one in llm.generate({}, how, request_id)]


async def told(tokenizer: Any, streams: bool, ids: bool, is_fair: bool) -> tuple[Any, ...]:
    """All that the answer to one request says."""
    tokens = tokenizer.encode(TEXT)
    steps = [step({"a": one}, n == len(tokens) - 1, 21) for n, one in enumerate(tokens)]
    llm = Llm(tokenizer, steps)
    if is_fair:
        installed(llm)
    asking = asyncio.create_task(answer(llm, params(streams, ids), "a"))
    await asyncio.sleep(0)
    handler = llm.handle_outputs()
    parts = [one.outputs[0] for one in await asyncio.wait_for(asking, 30)]
    handler.cancel()
    return (
        "".join(one.text for one in parts),
        [token for one in parts for token in one.token_ids],
        [position for one in parts for position in one.logprobs],
        parts[-1].cumulative_logprob,
    )


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


async def begun(llm: Any, name: str, how: Any) -> asyncio.Task[Any]:
    """An answer that is asked for, and has begun if it may."""
    task = asyncio.create_task(answer(llm, how, name))
    for _ in range(10):
        await asyncio.sleep(0)
    return task


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


class Refusing(Llm):
    """Which answers a grammar with an error, or with an output that ends by one."""

    def __init__(self, tokenizer: Any, error: Exception | None) -> None:
        super().__init__(tokenizer, [])
        self.vllm_config.structured_outputs_config.backend = "xgrammar"
        self.errored, self.error = False, error

    async def generate(self, _prompt: Any, _params: Any, _request_id: str) -> Any:
        if self.error is not None:
            raise self.error
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="error")])


@pytest.fixture
def refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return partial(why_refused, tokenizer, monkeypatch)


async def why_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, schema: Any, error: Exception | None
) -> str:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from workers.vllm.chat import fair_chat

    async def compiles(*_asked: Any) -> None:
        pass

    monkeypatch.setattr(fair_chat.Grammars, "check", compiles)
    llm = Refusing(tokenizer, error)
    installed(llm)
    how = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    with pytest.raises(BadRequest) as found:
        await answer(llm, how, "a")
    assert found.value.param == "structured_outputs"
    return str(found.value)


async def test_a_grammar_that_allows_no_token_is_the_clients_fault(
    refused: Callable[..., Any],
) -> None:
    assert "refers to itself" in await refused({"$ref": "#"}, None)


@pytest.mark.parametrize("error", [ValueError, RecursionError, KeyError])
async def test_so_is_one_that_vllm_cannot_read(
    refused: Callable[..., Any], error: type[Exception]
) -> None:
    found: Exception = error("no such thing")
    if not isinstance(found, ValueError):  # as vLLM wraps what it does not expect
        found, found.__cause__ = RuntimeError("in generate"), found
    assert "no such thing" in await refused({}, found)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        (
            {"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"b": {}}},
            "At #: properties, propertyNames.",
        ),
        (
            {"anyOf": [{"type": "array", "items": {}, "uniqueItems": True, "contains": {}}]},
            "At #/anyOf/0: contains, uniqueItems.",
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}},
            "At #/properties/a: multipleOf.",
        ),
        (
            {"type": "integer", "multipleOf": 3, **{f"k{n}": n for n in range(20_000)}},
            "At #: one of its keywords.",
        ),
    ],
    ids=["object", "array", "integer", "20,000 keywords"],
)
async def test_what_xgrammar_does_not_take_of_a_schema_is_named(
    refused: Callable[..., Any], schema: dict[str, Any], what: str
) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    with pytest.raises(Exception, match="not supported by xgrammar") as found:
        validate_xgrammar_grammar(asked)
    assert what in await refused(schema, found.value)


def test_nor_of_one_in_a_structural_tag(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm.release import answers

    chat = installed(Refusing(tokenizer, None)).fair

    def asked(schema: Any) -> Any:
        one = {"begin": "<f>", "schema": schema, "end": "</f>"}
        tag = json.dumps({"structures": [one], "triggers": ["<f"]})
        return SimpleNamespace(structured_outputs=SimpleNamespace(structural_tag=tag))

    chat.refuse(asked({"type": "integer"}))
    with pytest.raises(BadRequest, match="At #/items: multipleOf") as found:
        chat.refuse(asked({"type": "array", "items": {"type": "integer", "multipleOf": 3}}))
    assert found.value.param == "structured_outputs"
    with monkeypatch.context() as patch:
        patch.setattr(answers, "unsupported", Mock(side_effect=RecursionError))
        with pytest.raises(BadRequest, match="nested too deeply"):
            chat.refuse(asked({"type": "integer"}))
    endless = SimpleNamespace(structured_outputs=SimpleNamespace(structural_tag="[" * 100_000))
    chat.refuse(endless)  # the trial reports it


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "none"}},
        {"regex": "("},
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "none"}}'},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_vllms_server_leaves_what_takes_long_to_the_trial(
    tokenizer: Any, asked: dict[str, Any]
) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    installed(Refusing(tokenizer, None))
    validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(**asked)))


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
