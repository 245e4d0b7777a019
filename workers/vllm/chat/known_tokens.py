"""Answers requests that contain known tokens (the tokens of another node's answer) with the
logprobs that this engine gives these tokens. Replaces vLLM's `generate`; vLLM's server still
renders the prompt, creates the parameters and formats the outputs.
"""

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from importlib.metadata import entry_points
from typing import Any

from workers.engines.validations import Validations, Way
from workers.vllm.chat.errors import BadRequest, CannotForce
from workers.vllm.chat.scoring import PROCESSED, RAW, Scoring
from workers.vllm.release import answers, extra_args

# Arguments of `generate` that a request for rows uses too.
_PASSED_ON = ("lora_request", "priority", "data_parallel_rank")
_PROCESSORS = "vllm.logits_processors"


class KnownTokens:
    """A wrapper of vLLM's `generate` that also answers requests with known tokens."""

    def __init__(self, llm: Any, no_hooks: str, check_tokens: Callable[[Any], None]) -> None:
        """`no_hooks`: why ranks cannot score known tokens. `check_tokens`: Limits.refuse_tokens."""
        self.validations = Validations()
        self._llm = llm
        config = llm.vllm_config
        self._mode: str = config.model_config.logprobs_mode
        self._check_tokens = check_tokens
        self._no_steps = self._no_pass = self._no_mode = no_hooks
        if config.speculative_config is not None:
            self._no_steps = no_hooks or "speculative decoding puts drafts in their place"
        if config.cache_config.kv_sharing_fast_prefill:
            fault = "--kv-sharing-fast-prefill leaves out what a prompt's logprobs need"
            self._no_pass = no_hooks or fault
        if self._mode not in (RAW, PROCESSED):
            self._no_mode = no_hooks or f"the engine tells {self._mode}"
        # The operator's logits processors, including those that installed packages register.
        self._processors = bool(
            config.model_config.logits_processors or entry_points(group=_PROCESSORS)
        )
        self._generate: Callable[..., AsyncGenerator[Any, None]] = llm.generate

    def settle(self, way: Way, no_steps: str = "") -> None:
        """Sets how known tokens are scored. `no_steps`: why decode steps cannot score them."""
        self.validations.way = way
        self._no_steps = self._no_steps or no_steps

    @property
    def why_no_pass(self) -> str:
        return self._no_pass or self._no_mode

    @property
    def why_no_steps(self) -> str:
        return self._no_steps or self._no_mode

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **named: Any
    ) -> AsyncIterator[Any]:
        """Returns a request's outputs. Raises CannotForce if this engine cannot score the known
        tokens or use the logprobs_mode, and BadRequest if the request exceeds a limit. An error is
        raised at once or instead of the first output.
        """
        extra = getattr(sampling_params, "extra_args", None)
        if extra and extra_args.KNOWN_TOKENS in extra:
            self._refuse(prompt, sampling_params)
            return self._known(prompt, sampling_params, request_id, named)
        if extra and extra_args.LOGPROBS_MODE in extra:
            if extra[extra_args.LOGPROBS_MODE] == self._mode:
                del extra[extra_args.LOGPROBS_MODE]
            elif self._no_mode:
                raise CannotForce(f"another logprobs_mode than the engine's: {self._no_mode}")
        return self._generate(prompt, sampling_params, request_id, **named)

    async def rows(
        self, way: Way, prompt: Any, params: Any, tokens: list[int], request_id: str
    ) -> answers.Rows:
        """Returns the trial's scores of known tokens, one row per token. Uses no prefix cache."""
        request = await self._checked(prompt, params, request_id, {})
        if way == "steps":
            return await self._by_steps(prompt, params, tokens, request_id, {})
        return await self._by_pass(prompt, request, tokens, request_id, {}, (True,))

    def _refuse(self, prompt: Any, params: Any) -> None:
        if self.validations.way == "none":
            raise CannotForce(
                self.why_no_pass or self.why_no_steps or "the trial at start-up failed"
            )
        kind = prompt.get("type") if isinstance(prompt, dict) else None
        if kind not in ("token", "multimodal"):
            raise CannotForce(f"the prompt is of {kind or 'an unknown kind'}, not of tokens")
        if params.prompt_logprobs is not None:
            raise CannotForce("the prompt's logprobs are asked for too")
        if self._way(params) == "steps" and self.why_no_steps:
            raise CannotForce(self.why_no_steps)
        n, most = len(prompt["prompt_token_ids"]), self._llm.model_config.max_model_len
        if n + len(params.extra_args[extra_args.KNOWN_TOKENS]) > most:
            raise BadRequest(
                f"The known tokens and a prompt of {n} do not fit this node's context of {most}."
            )

    def _way(self, params: Any) -> Way:
        """Returns how to score a request: in decode steps if its parameters forbid one pass."""
        stepwise = (
            params.structured_outputs is not None
            or params.thinking_token_budget is not None
            or params.logprobs == -1
            or params.logprob_token_ids is not None
            or self._processors
        )
        return "steps" if stepwise or self.why_no_pass else self.validations.way

    async def _known(
        self, prompt: Any, params: Any, request_id: str, named: dict[str, Any]
    ) -> AsyncIterator[Any]:
        began = time.monotonic()
        # Without the known tokens, which vLLM would copy and check one by one.
        bare = copy.copy(params)
        bare.extra_args = dict(params.extra_args)
        known = bare.extra_args.pop(extra_args.KNOWN_TOKENS)
        request = await self._checked(prompt, bare, request_id, named)
        answer = answers.Answer(self._llm, request, prompt.get("prompt"), known)
        way = self._way(params)
        if way == "steps":
            rows = await self._by_steps(prompt, params, answer.tokens, request_id, named)
        else:
            rows = await self._by_pass(prompt, request, answer.tokens, request_id, named)
        if len(rows) < len(answer.tokens):
            raise CannotForce(f"the engine scored {len(rows)} of {len(answer.tokens)} tokens")
        self.validations.add(way, time.monotonic() - began)
        for outputs in answer.outputs(rows):
            for output in outputs:
                yield output
            await asyncio.sleep(0)  # lets other work run

    async def _checked(
        self, prompt: Any, params: Any, request_id: str, named: dict[str, Any]
    ) -> Any:
        """Returns vLLM's internal request for a prompt, after vLLM's checks and additions."""
        llm = self._llm
        request = llm.input_processor.process_inputs(
            request_id,
            prompt,
            params,
            supported_tasks=await llm.get_supported_tasks(),
            lora_request=named.get("lora_request"),
        )
        llm.input_processor.assign_request_id(request)
        self._check_tokens(request.sampling_params)
        return request

    async def _by_pass(
        self,
        prompt: Any,
        request: Any,
        tokens: list[int],
        request_id: str,
        named: dict[str, Any],
        skip_cache: tuple[bool, ...] = (False, True),
    ) -> answers.Rows:
        """Scores all known tokens in one prefill of the prompt and of all known tokens except the
        last. Repeats the prefill without the prefix cache if the cache skips tokens to score.
        """
        before = request.prompt_token_ids
        scoring = Scoring.of(
            request.sampling_params, before, tokens, self._mode_of(request.sampling_params)
        )
        known = {**prompt, "prompt_token_ids": [*before, *tokens[:-1]]}
        for skip in skip_cache:
            params = answers.pass_params(scoring.n_best, scoring.packed(), skip)
            output = await self._last(known, params, f"{request_id}-pass", named)
            rows: answers.Rows = output.prompt_logprobs
            if len(rows) == len(tokens):
                return rows
        return rows

    async def _by_steps(
        self, prompt: Any, params: Any, tokens: list[int], request_id: str, named: dict[str, Any]
    ) -> answers.Rows:
        """Scores each token in a decode step. Drops the grammar if it refuses a token."""
        params = answers.step_params(params, tokens, self._mode_of(params))
        output = await self._last(prompt, params, f"{request_id}-steps", named)
        (choice,) = output.outputs
        rows = answers.Rows.of(choice.logprobs)
        if list(choice.token_ids) != tokens[: len(rows)]:
            raise CannotForce("the engine decoded other tokens than it was given")
        if (
            len(rows) < len(tokens)
            and choice.finish_reason == "error"
            and params.structured_outputs
        ):
            params.structured_outputs = None
            free = await self._by_steps(prompt, params, tokens, request_id, named)
            return rows + free[len(rows) :]
        return rows

    async def _last(self, prompt: Any, params: Any, request_id: str, named: dict[str, Any]) -> Any:
        more = {name: named[name] for name in _PASSED_ON if name in named}
        if params.structured_outputs is not None:
            more |= {name: one for name, one in named.items() if name.startswith("reasoning_")}
        async with aclosing(self._generate(prompt, params, request_id, **more)) as outputs:
            async for output in outputs:
                last = output
        return last

    def _mode_of(self, params: Any) -> str:
        return str(params.extra_args.get(extra_args.LOGPROBS_MODE) or self._mode)
