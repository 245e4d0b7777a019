"""What the validation of chat costs on one engine: one forward, decode steps, vLLM's own prefill,
and ordinary chat.

    python -m bench.validation_speed --model tiny-qwen3 --known-tokens 256   # anywhere
    python -m bench.validation_speed --dimensions qwen3-8b                    # on a GPU
    python -m bench.validation_speed --dimensions qwen3-8b --profile          # of many at once only

Every figure is printed as soon as it is there. Ordinary chat is decoded before the hooks are there
and after; both ways score the same tokens; prefill takes as many prompts as long as a validation's
prompt and tokens together.
"""

import asyncio
import gc
import json
import statistics
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import typer

from bench.harness import machine
from bench.harness.engine import engine_of, takes_engine
from bench.harness.report import console, exit_with, run, verdict
from workers.engines.options import EngineOptions
from workers.vllm.release.extra_args import KNOWN_TOKENS, TOKEN_IDS

T = TypeVar("T")

# The network asks for so many entries a position.
_BEST = 5
_TIMEOUT_S = 1800
# Of torch's table: its head, and the kernels that take most.
_TABLE_LINES = 25
# Least times that one forward is faster than steps, ratio of tokens/s to prefill's, and ratio of
# chat's speed to that without hooks.
STEPS_TARGET, PREFILL_TARGET, CHAT_TARGET = 20.0, 0.8, 0.98


@takes_engine()
def main(
    *,
    engine_options: EngineOptions,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    known_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    at_once: Annotated[int, typer.Option(min=1, help="Validations, and chats, at a time.")] = 32,
    chat_tokens: Annotated[int, typer.Option(min=1, help="Of each ordinary chat.")] = 256,
    repeat: Annotated[int, typer.Option(min=1, help="Runs; their medians are compared.")] = 3,
    profile: Annotated[
        bool, typer.Option(help="Validations at once only, and where their time goes.")
    ] = False,
) -> None:
    """One forward against steps and prefill, and chat with hooks and without. Exit 1: a target is
    missed."""

    def measure() -> bool:
        with ExitStack() as exits:
            traces = exits.enter_context(TemporaryDirectory()) if profile else None
            more = _profiler(traces) if traces else ()
            told = (*engine_options.vllm_args, *more)
            options = engine_options.model_copy(update={"vllm_args": told})
            engine = exits.enter_context(engine_of(options))
            bench = _Bench(engine, prompt_tokens, known_tokens, repeat)
            if traces:
                bench.hook()
                passed = bench.many(at_once)
                bench.profile(at_once, traces)
                return passed
            passed = all([bench.chat(at_once, chat_tokens), bench.one(), bench.many(at_once)])
            bench.longest()
            return passed

    exit_with(measure)


class _Bench:
    def __init__(self, engine: Any, prompt_tokens: int, known_tokens: int, repeat: int) -> None:
        self._engine, self._repeat = engine, repeat
        self._prompt, self._known = prompt_tokens, known_tokens
        self._asked = 0
        # As vLLM's server does when it begins to serve: nobody looks for garbage in what stays.
        gc.collect()
        gc.freeze()

    def chat(self, n: int, tokens: int) -> bool:
        """Ordinary chats that tell logprobs, before the hooks and after: installs them."""

        def chats(**extra: Any) -> None:
            self._ask(n, self._prompt, tokens, extra)

        chats()  # compiles, records graphs
        took = {"without hooks": self._median(chats)}
        self.hook()
        chats()
        took["with hooks"] = self._median(chats)
        took["with hooks, ids for text"] = self._median(lambda: chats(**{TOKEN_IDS: 1}))
        for what, seconds in took.items():
            rate = 1000 * seconds / tokens
            said = f"{n} chats of {tokens} tokens {what}: {rate:.3f} ms a token"
            console.print(said, highlight=False)
        slowest = max(seconds for what, seconds in took.items() if what != "without hooks")
        what = "speed of chat with hooks over that without"
        return verdict(what, took["without hooks"] / slowest, CHAT_TARGET)

    def hook(self) -> None:
        began = time.perf_counter()
        self._engine.validations = self._engine._score_known_tokens()
        trial_s = time.perf_counter() - began
        way = self._engine.validations.way
        console.print(f"hooks and trial: {trial_s:.2f} s; known tokens by {way}", highlight=False)

    def one(self) -> bool:
        """One validation, in one forward and by steps."""
        by_pass, by_steps = self._validated("pass"), self._validated("steps")
        for way, seconds in (("one forward", by_pass), ("steps", by_steps)):
            console.print(f"{self._known} known tokens in {way}: {seconds:.3f} s", highlight=False)
        return verdict("one forward, times as fast as steps", by_steps / by_pass, STEPS_TARGET)

    def many(self, n: int) -> bool:
        """Validations at once, against as many prompts as long."""
        length = self._prompt + self._known - 1
        self._ask(n, length, 1, {})  # or what vLLM keeps of a long prefill counts as a validation's
        before = machine.gpu_mib()
        self._validate(n, "pass")
        validated = self._median(lambda: self._validate(n, "pass"))
        grown = machine.gpu_mib() - before
        filled = self._median(lambda: self._ask(n, length, 1, {}))
        for what, seconds in (("validated", validated), ("prefilled", filled)):
            console.print(
                f"{n} at once {what}: {n * length / seconds:,.0f} tokens/s", highlight=False
            )
        console.print(f"memory that validations took: {grown} MiB", highlight=False)
        return verdict("tokens/s of validations over prefill's", filled / validated, PREFILL_TARGET)

    def longest(self) -> None:
        """One validation of as many tokens as fit: what memory it takes."""
        known = self._engine.info.max_seq_len - self._prompt
        before, began = machine.gpu_mib(), time.perf_counter()
        self._ask(1, self._prompt, known, {KNOWN_TOKENS: _tokens(0, known), TOKEN_IDS: 1})
        seconds = time.perf_counter() - began
        grown = machine.gpu_mib() - before
        console.print(f"{known} known tokens: {seconds:.3f} s, {grown} MiB more", highlight=False)

    def profile(self, n: int, traces: str) -> None:
        """Where the time of validations at once, and of as many prefills, goes: the front end's,
        and the engine's by kernels."""
        length = self._prompt + self._known - 1
        works: dict[str, Callable[[], None]] = {
            "prefilled": lambda: self._ask(n, length, 1, {}),
            "validated": lambda: self._validate(n, "pass"),
        }
        for what, work in works.items():
            before = self._on_loop(_cpu_seconds())
            work()
            spent = (self._on_loop(_cpu_seconds()) - before) / n / length
            said = f"front end, {what}: {1e6 * spent:.2f} us of a core a token"
            console.print(said, highlight=False)
        for what, work in works.items():
            self._on_loop(self._engine._llm.start_profile())
            work()
            self._on_loop(self._engine._llm.stop_profile())
            for table in Path(traces).glob("*profiler_out*"):
                lines = table.read_text().splitlines()
                shown = [*lines[:_TABLE_LINES], *lines[-3:]]
                said = "\n".join([f"{what}, {table.name}:", *shown])
                console.print(said, highlight=False, markup=False, soft_wrap=True)
                table.unlink()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._engine._loop).result(_TIMEOUT_S)

    def _validated(self, way: str) -> float:
        """Seconds of one validation."""
        self._validate(1, way)
        return self._median(lambda: self._validate(1, way))

    def _validate(self, n: int, way: str) -> None:
        self._engine.validations.way = way
        known = _tokens(0, self._known)
        self._ask(n, self._prompt, self._known, {KNOWN_TOKENS: known, TOKEN_IDS: 1})

    def _ask(self, n: int, prompt_tokens: int, tokens: int, extra: dict[str, Any]) -> None:
        """As many prompts that the engine has never seen, all at once, to the last token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def one() -> int:
            self._asked += 1
            prompt = {"type": "token", "prompt_token_ids": _tokens(self._asked, prompt_tokens)}
            sampling = SamplingParams(
                temperature=0.99,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=None if tokens == 1 else _BEST,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=dict(extra),
            )
            salted = prompt | {"cache_salt": uuid.uuid4().hex}
            outputs = self._engine._llm.generate(salted, sampling, uuid.uuid4().hex)
            last = [output async for output in outputs][-1]
            return len(last.outputs[0].token_ids)

        async def every() -> list[int]:
            return await asyncio.gather(*(one() for _ in range(n)))

        counts = self._on_loop(every())
        assert counts == [tokens] * n, counts

    def _median(self, work: Callable[[], object]) -> float:
        took = []
        for _ in range(self._repeat):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
        return statistics.median(took)


async def _cpu_seconds() -> float:
    return time.thread_time()


def _profiler(traces: str) -> list[str]:
    """Arguments of `vllm serve`: torch's profiler in the ranks."""
    told = {
        "profiler": "torch",
        "torch_profiler_dir": traces,
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }
    return ["--profiler-config", json.dumps(told)]


def _tokens(seed: int, n: int) -> list[int]:
    return [(seed * 31 + place * 7) % 400 + 10 for place in range(n)]


if __name__ == "__main__":
    run(main)
