"""The cost of validating chats on one engine, compared with decode steps, prefill and chat.

    python -m bench.validation_speed --model tiny-qwen3 --known-tokens 256   # anywhere
    python -m bench.validation_speed --dimensions qwen3-8b                    # on a GPU

One forward and decode steps score the same tokens. Chat is measured before and after the hooks are
installed. Prefill takes as many prompts, each as long as a validation's prompt and tokens together.
"""

import asyncio
import gc
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import typer

from bench.harness import machine
from bench.harness.engine import engine_of, takes_engine
from bench.harness.report import Repeat, at_least, measures, run, say
from workers.engines.options import EngineOptions
from workers.vllm.release.extra_args import KNOWN_TOKENS, TOKEN_IDS

# Logprobs per position that the network requests.
_BEST = 5
_TIMEOUT_S = 1800
# Least ratios: speed of one forward to that of steps, tokens/s of validations to those of prefill,
# and speed of chat with hooks to that without.
STEPS_TARGET, PREFILL_TARGET, CHAT_TARGET = 20.0, 0.8, 0.98


@takes_engine()
@measures
def main(
    *,
    engine_options: EngineOptions,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 256,
    known_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    at_once: Annotated[int, typer.Option(min=1, help="Validations, and chats, at a time.")] = 32,
    chat_tokens: Annotated[int, typer.Option(min=1, help="Of each ordinary chat.")] = 256,
    repeat: Repeat = 3,
) -> bool:
    """Compares one forward with steps and prefill, and chat with hooks with chat without them.

    Exits with 1 when a target is missed.
    """
    with engine_of(engine_options) as engine:
        bench = _Bench(engine, prompt_tokens, known_tokens, repeat)
        passed = all([bench.chat(at_once, chat_tokens), bench.one(), bench.many(at_once)])
        bench.longest()
        return passed


class _Bench:
    """Measurements on one loaded engine."""

    def __init__(self, engine: Any, prompt_tokens: int, known_tokens: int, repeat: int) -> None:
        self._engine, self._repeat = engine, repeat
        self._prompt, self._known = prompt_tokens, known_tokens
        self._asked = 0
        # vLLM's server does the same before it serves: what stays is not searched for garbage.
        gc.collect()
        gc.freeze()

    def chat(self, n: int, tokens: int) -> bool:
        """Measures chats with logprobs before and after the hooks, which it installs."""

        def chats(**extra: Any) -> None:
            self._ask(n, self._prompt, tokens, extra)

        chats()  # compiles, records graphs
        took = {"without hooks": self._median(chats)}
        self._hook()
        chats()
        took["with hooks"] = self._median(chats)
        took["with hooks, ids for text"] = self._median(lambda: chats(**{TOKEN_IDS: 1}))
        for what, seconds in took.items():
            say(f"{n} chats of {tokens} tokens {what}: {1000 * seconds / tokens:.3f} ms a token")
        slowest = max(seconds for what, seconds in took.items() if what != "without hooks")
        ratio = took["without hooks"] / slowest
        return at_least("speed of chat with hooks over that without", ratio, CHAT_TARGET)

    def _hook(self) -> None:
        began = time.perf_counter()
        self._engine.validations = self._engine._score_known_tokens()
        trial_s = time.perf_counter() - began
        say(f"hooks and trial: {trial_s:.2f} s; known tokens by {self._engine.validations.way}")

    def one(self) -> bool:
        """Measures one validation in one forward and by steps."""
        took = {}
        for way in ("pass", "steps"):
            self._validate(1, way)  # warms up
            took[way] = self._median(lambda way=way: self._validate(1, way))  # type: ignore[misc]
        say(f"{self._known} known tokens: {took['pass']:.3f} s, by steps {took['steps']:.3f} s")
        ratio = took["steps"] / took["pass"]
        return at_least("one forward, times as fast as steps", ratio, STEPS_TARGET, ".1f")

    def many(self, n: int) -> bool:
        """Measures `n` concurrent validations, and the prefill of as many prompts as long."""
        length = self._prompt + self._known - 1
        self._ask(n, length, 1, {})  # else the memory of a long prefill counts as a validation's
        before = machine.gpu_mib()
        self._validate(n, "pass")
        validated = self._median(lambda: self._validate(n, "pass"))
        grown = machine.gpu_mib() - before
        filled = self._median(lambda: self._ask(n, length, 1, {}))
        for what, seconds in (("validated", validated), ("prefilled", filled)):
            say(f"{n} at once {what}: {n * length / seconds:,.0f} tokens/s")
        say(f"memory that validations took: {grown} MiB")
        ratio = filled / validated
        return at_least("tokens/s of validations over prefill's", ratio, PREFILL_TARGET)

    def longest(self) -> None:
        """Measures the time and the memory of one validation of as many tokens as fit."""
        known = self._engine.info.max_seq_len - self._prompt
        before, began = machine.gpu_mib(), time.perf_counter()
        self._ask(1, self._prompt, known, {KNOWN_TOKENS: _tokens(0, known), TOKEN_IDS: 1})
        seconds = time.perf_counter() - began
        say(f"{known} known tokens: {seconds:.3f} s, {machine.gpu_mib() - before} MiB more")

    def _validate(self, n: int, way: str) -> None:
        self._engine.validations.way = way
        known = _tokens(0, self._known)
        self._ask(n, self._prompt, self._known, {KNOWN_TOKENS: known, TOKEN_IDS: 1})

    def _ask(self, n: int, prompt_tokens: int, tokens: int, extra: dict[str, Any]) -> None:
        """Sends `n` prompts that the engine has never seen at once, and reads all answers."""
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

        asked = asyncio.run_coroutine_threadsafe(every(), self._engine._loop)
        counts = asked.result(_TIMEOUT_S)
        assert counts == [tokens] * n, counts

    def _median(self, work: Callable[[], object]) -> float:
        took = []
        for _ in range(self._repeat):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
        return statistics.median(took)


def _tokens(seed: int, n: int) -> list[int]:
    return [(seed * 31 + place * 7) % 400 + 10 for place in range(n)]


if __name__ == "__main__":
    run(main)
