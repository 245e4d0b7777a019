"""Our steps for chat between vLLM's server and its engine: network fields, limits, fair shares."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from workers.vllm.chat.fair_chat import FairChat
from workers.vllm.chat.fields import SALT, TOLD
from workers.vllm.chat.known_tokens import KnownTokens
from workers.vllm.chat.limits import Limits
from workers.vllm.chat.network_fields import PATHS, NetworkFields
from workers.vllm.release import answers


class ChatPipeline:
    """Our steps for the chat requests of one AsyncLLM. They run on the AsyncLLM's event loop."""

    def __init__(self, llm: Any, no_hooks: str) -> None:
        """`no_hooks`: why vLLM's ranks cannot score known tokens; empty if they can."""
        model = llm.vllm_config.model_config
        n_ids = model.get_vocab_size()
        self._llm = llm
        self._limits = Limits(n_ids=n_ids, **answers.limits())
        self._fields = NetworkFields(n_ids, model.max_model_len, llm.output_processor.tokenizer)
        self.known = KnownTokens(llm, no_hooks, self._limits.refuse_tokens)
        self.fair = FairChat(llm)
        self._begin = llm.output_processor.add_request

    def install(self) -> None:
        """Replaces methods of the AsyncLLM, so that every request passes through this pipeline."""
        core = self._llm.engine_core
        self._llm.generate = self.generate
        self._llm.output_processor.add_request = self.begin_answer
        core.get_output_async = partial(self.fair.next_step, core.get_output_async)

    async def read(self, path: str, request: Any, values: Iterable[Any]) -> None:
        """Checks a body that vLLM's server has parsed, with pauses for the event loop. Raises
        BadRequest or CannotForce. `values`: the arguments of the route's function.
        """
        if path in PATHS:
            TOLD.set(await self._fields.of(await request.json()) or TOLD.get())
        for value in values:
            for _ in self._limits.check(value):
                await asyncio.sleep(0)
            self.fair.refuse(value)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **named: Any
    ) -> AsyncIterator[Any]:
        """Replaces AsyncLLM.generate. Raises an error immediately or with the first output."""
        if SALT.get() and isinstance(prompt, dict) and not prompt.get("cache_salt"):
            prompt = {**prompt, "cache_salt": SALT.get()}
        told = TOLD.get()
        if told is not None:
            sampling_params.extra_args = told.extra_args(sampling_params)
            if told.no_grammar:
                sampling_params.structured_outputs = None
        self._limits.refuse(sampling_params)
        self._limits.refuse_foreign(prompt, sampling_params)
        outputs = self.known.generate(prompt, sampling_params, request_id, **named)
        return self.fair.shared(outputs, sampling_params)

    def begin_answer(self, request: Any, *told: Any, **named: Any) -> None:
        """Replaces the output processor's add_request: checks and registers requests."""
        self._limits.refuse(request)
        self._limits.refuse(request.sampling_params)
        self._limits.refuse_tokens(request.sampling_params)
        self._begin(request, *told, **named)
        answers.shape_logprobs(self._llm.output_processor, request)
        self.fair.begin(request)
