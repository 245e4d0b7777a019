"""An engine core and an `AsyncLLM` in place of vLLM's."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from workers.vllm.release.extra_args import TOKEN_IDS

N_BEST = 3
# "héllo" and characters of several tokens each, which have no text of their own.
TEXT = "héllo 🦜 世界 ok"


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


async def begun(llm: Any, name: str, how: Any) -> asyncio.Task[Any]:
    """An answer that is asked for, and has begun if it may."""
    task = asyncio.create_task(answer(llm, how, name))
    for _ in range(10):
        await asyncio.sleep(0)
    return task
