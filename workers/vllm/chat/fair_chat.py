"""Shares an engine among clients: checks grammars in another process, handles answers in turns."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

from poc_core import fair_queue
from workers.vllm.chat import late_logprobs
from workers.vllm.chat.errors import BadRequest
from workers.vllm.chat.fields import CLIENT
from workers.vllm.chat.grammars import Grammars, schemas_in_tags, text_of
from workers.vllm.chat.in_parts import Parts, WholeAnswers
from workers.vllm.chat.wide_answers import MOST, USUAL, WideAnswers
from workers.vllm.release import answers

logger = logging.getLogger(__name__)

_GRAMMAR = "structured_outputs"
_DEAD_END = (
    "The grammar allows no token of this model at the answer's current position, or takes too long"
    " there: a schema that refers to itself without an end allows none, and an ambiguous grammar"
    " takes longer with each token."
)
# Cost of receiving one answer's token from the engine core, in units of formatted numbers.
_COST = 4
# Age in seconds from which a report of the engine core is late; how many tokens of late reports are
# then processed without a pause (5 to 15 ms); and the cost of a step in tokens.
_LATE_S, _AT_ONCE, _STEP = 0.02, 400, 10


class FairChat:
    """Shares one engine fairly among its clients, on the engine's event loop."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turns = fair_queue.Turns()
        self._wide = WideAnswers(self._others_go_on)
        self._compiles = answers.compiles_by_xgrammar(llm)
        # With other backends, vLLM tries another compiler after xgrammar's error.
        is_final = llm.vllm_config.structured_outputs_config.backend == "xgrammar"
        self._grammars = Grammars(lambda: answers.vocabulary(llm), is_final=is_final)
        if self._compiles and is_final:
            answers.leave_schemas_to_trials()
        self._n_late = 0  # tokens of late steps since the loop was last yielded

    def format_in_turns(self, app: Any) -> None:
        """Patches vLLM's application so that it formats the logprobs of complete (not streamed)
        answers in small portions, in turns between clients.
        """
        handlers = {id(one): one for one in vars(app.state)["_state"].values()}
        for handler in handlers.values():
            if hasattr(handler, "_create_chat_logprobs"):
                WholeAnswers(handler, self._turn_of).install()

    def refuse(self, body: Any) -> None:
        """Raises BadRequest if xgrammar does not support a schema in the body's structural tags."""
        for schema in schemas_in_tags(body) if self._compiles else ():
            try:
                what = answers.unsupported(schema)
            except RecursionError:
                what = "It is nested too deeply."
            if what:
                raise BadRequest(
                    f"xgrammar does not support a schema in a structural tag. {what}",
                    _GRAMMAR,
                )

    async def _turn_of(self, width: int) -> int:
        n = max(1, fair_queue.BUDGET // width)
        await self._turns.wait(CLIENT.get(), n * width)
        return n

    async def close(self) -> None:
        await self._grammars.close()

    def begin(self, request: Any) -> None:
        """Prepares an answer's delivery: in parts if it has logprobs (late_logprobs.py)."""
        params = request.sampling_params
        width, of_prompt = _widths(params)
        if not _is_wide(width, of_prompt):
            self._wide.another_began()
        queue = self._llm.output_processor.request_states[request.request_id].queue
        # All answers to one request share its queue.
        if width > 1 and queue is not None and queue.aggregate and "put" not in vars(queue):
            Parts(queue.ready, max(1, fair_queue.BUDGET // width)).install(queue)
        if width > 1 or of_prompt > 1:
            late_logprobs.keep_late(self._llm.output_processor, request)

    async def next_step(self, own: Callable[[], Awaitable[Any]]) -> Any:
        """Returns the engine core's next report, from vLLM's method `own`. vLLM processes all
        waiting reports without a pause. This method lets other tasks run between two reports, but
        processes a few late reports at once, because all answers wait for them.
        """
        if not 0 < self._n_late < _AT_ONCE:
            await asyncio.sleep(0)
            self._n_late = 0
        told = await own()
        is_late = time.monotonic() - told.timestamp > _LATE_S
        self._n_late = self._n_late + _STEP + len(told.outputs) if is_late else 0
        self._turns.keep_up_with(_COST * len(told.outputs))
        return told

    def shared(self, outputs: AsyncIterator[Any], params: Any) -> AsyncIterator[Any]:
        """Yields a request's outputs in turns with other clients. Raises BadRequest if the
        request's grammar cannot be used.
        """
        asked = text_of(getattr(params, "structured_outputs", None)) if self._compiles else None
        if asked is None and max(_widths(params)) == 1:
            return outputs
        return self._fair(outputs, CLIENT.get(), asked, params)

    async def _fair(
        self, outputs: Any, client: str, asked: tuple[str, str] | None, params: Any
    ) -> AsyncIterator[Any]:
        width, of_prompt = _widths(params)
        if asked is not None:
            outputs = self._with_grammar(outputs, asked)
        async with aclosing(outputs), AsyncExitStack() as place:
            if asked is not None:
                await self._grammars.check(*asked, client)
            if _is_wide(width, of_prompt):
                # A prompt's logprobs all come at once, so such requests run one at a time.
                n = getattr(params, "n", 1) if of_prompt == 1 else MOST
                await place.enter_async_context(self._wide.under_way(client, n))
            async for output in outputs:
                if of_prompt > 1:
                    output.prompt_logprobs = await self._in_turns(
                        output.prompt_logprobs, client, of_prompt
                    )
                if width > 1:
                    for one in output.outputs:
                        one.logprobs = await self._in_turns(one.logprobs, client, width)
                yield output

    async def _with_grammar(self, outputs: Any, asked: tuple[str, str]) -> AsyncIterator[Any]:
        """Yields the outputs. BadRequest if vLLM refuses the client's grammar, or if the grammar
        allows no next token. vLLM itself would answer 500, or 200 with an error event.
        """
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if any(one.finish_reason == "error" for one in output.outputs):
                        raise BadRequest(_DEAD_END, _GRAMMAR)
                    yield output
        except Exception as error:
            why = answers.why_no_grammar(error, *asked)
            if why is None or self._llm.errored:
                raise
            raise BadRequest(why, _GRAMMAR) from error

    def _others_go_on(self) -> bool:
        states = self._llm.output_processor.request_states.values()
        asked = (state.logprobs_processor for state in states)
        return not all(_is_wide(*_widths(one)) for one in asked)

    async def _in_turns(self, logprobs: Any, client: str, width: int) -> Any:
        """Returns an answer's new logprobs as vLLM's objects, created in the client's turns."""
        n, at_once = len(logprobs or ()), max(1, fair_queue.BUDGET // width)
        found: list[Any] = []
        for at in range(0, n, at_once):
            await self._turns.wait(client, width * min(at_once, n - at))
            if isinstance(logprobs, list):
                found += late_logprobs.made(logprobs[at : at + at_once])
        return found if isinstance(logprobs, list) else logprobs


def _widths(asking: Any) -> tuple[int, int]:
    """Returns how many numbers to format per token: of the answer, and of the prompt."""
    prompt = getattr(asking, "num_prompt_logprobs", getattr(asking, "prompt_logprobs", None))
    return _width(getattr(asking, "num_logprobs", None)), _width(prompt)


def _width(n_logprobs: int | None) -> int:
    return 1 if n_logprobs is None else 2 + max(0, n_logprobs)


def _is_wide(width: int, of_prompt: int) -> bool:
    return width > 2 + USUAL or of_prompt > 1
