"""Greedy chat through a running stack, and how two answers to the same prompt compare."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cli.machine.gpus import visible_gpus, vllm_runs_on_cpu
from cli.supervise.stack import Stack
from tests.planted import unisolated
from tests.stacks.round_client import FAST, LOG_LINES, RoundClient, StackClient
from workers.engines.options import EngineOptions

MODEL = "tiny-qwen3"
CHAT = "/v1/chat/completions"
ANSWER_TOKENS = 64
# Log probabilities this close are a tie, which another batch size may round the other way. What a
# proof leaves in a KV cache moves them by tenths.
TIE = 1e-3

_WORDS = (
    "the",
    "sea",
    "wind",
    "over",
    "field",
    "grass",
    "and",
    "stone",
    "ships",
    "at",
    "noon",
    "while",
    "children",
)
_TOKENS_PER_CHARACTER = 0.82  # of the shipped tokenizer, on these words
_TEMPLATE_TOKENS = 12


@dataclass(frozen=True)
class Answer:
    """A greedy answer, token by token."""

    tokens: list[int]
    margins: list[float]  # of each token: log probability ahead of the second best
    prompt_tokens: int
    cached_tokens: int  # of the prompt: found in the prefix cache
    seconds: float


def prompts(n: int, least_tokens: int = 20, most_tokens: int = 400, seed: int = 1) -> list[str]:
    """`n` prompts whose lengths in tokens are spread evenly between the two, shuffled."""
    rng = random.Random(seed)
    lengths = [
        least_tokens + (most_tokens - least_tokens) * index / max(1, n - 1) for index in range(n)
    ]
    rng.shuffle(lengths)
    return [
        _text(rng, int((tokens - _TEMPLATE_TOKENS) / _TOKENS_PER_CHARACTER)) for tokens in lengths
    ]


def _text(rng: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += rng.choice(_WORDS) + " "
    return text[:characters]


def request(
    prompt: str, max_tokens: int = ANSWER_TOKENS, salt: str | None = None, **more: Any
) -> dict[str, Any]:
    """A body for a greedy answer of exactly `max_tokens` tokens; `salt` parts cached prefixes."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt or uuid.uuid4().hex,
    } | more


def ask(
    http: httpx.Client,
    prompt: str,
    max_tokens: int = ANSWER_TOKENS,
    salt: str | None = None,
    model: str = MODEL,
) -> Answer:
    began = time.monotonic()
    wanted = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2, "model": model}
    answer = http.post(CHAT, json=request(prompt, max_tokens, salt, **wanted), timeout=240)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    (choice,) = body["choices"]
    best = [
        [entry["logprob"] for entry in token["top_logprobs"]]
        for token in choice["logprobs"]["content"]
    ]
    details = body["usage"].get("prompt_tokens_details") or {}
    return Answer(
        tokens=choice["token_ids"],
        margins=[first - second for first, second in best],
        prompt_tokens=body["usage"]["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
        seconds=time.monotonic() - began,
    )


def ask_all(
    http: httpx.Client,
    texts: Sequence[str],
    concurrency: int,
    between: Callable[[], object] = lambda: None,
    model: str = MODEL,
) -> list[Answer]:
    """The answers in order: `concurrency` prompts at a time; `between` comes after each wave."""
    answers: list[Answer] = []
    with ThreadPoolExecutor(concurrency) as pool:
        for wave in _waves(texts, concurrency):
            answers += pool.map(lambda text: ask(http, text, model=model), wave)
            between()
    return answers


def _waves(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (texts[first : first + size] for first in range(0, len(texts), size))


@dataclass
class Differences:
    """Prompts whose two answers differ, by why."""

    corrupted: list[int] = field(default_factory=list)
    # at the first other token the two best were as good as equal
    ties: list[int] = field(default_factory=list)


def differences(expected: Sequence[Answer], found: Sequence[Answer]) -> Differences:
    result = Differences()
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        pairs = zip(one.tokens, other.tokens, strict=True)
        at = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            (result.ties if one.margins[at] < TIE else result.corrupted).append(index)
    return result


class ConstantChat:
    """Requests that overlap so that chat is never idle, as a context manager.

    They are long, and too many to be all between two answers at once. `refused`: no whole answer.
    """

    def __init__(
        self,
        http: httpx.Client,
        threads: int = 4,
        max_tokens: int = 600,
        timeout_s: float | None = 120,
        streams: bool = False,
    ) -> None:
        self.answered = 0
        self._streams = streams
        self._timeout_s = timeout_s
        self.refused: list[str] = []
        self._http = http
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._talk, args=(index,)) for index in range(threads)
        ]

    def __enter__(self) -> ConstantChat:
        for thread in self._threads:
            thread.start()
            time.sleep(0.1)  # not in step
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _talk(self, index: int) -> None:
        rng = random.Random(index)
        while not self._stop.is_set():
            tokens = rng.randint(self._max_tokens // 2, self._max_tokens)
            body = request(_text(rng, 60), tokens, stream=self._streams)
            with self._http.stream("POST", CHAT, json=body, timeout=self._timeout_s) as answer:
                text = answer.read().decode()  # of a stream: to its end
            if answer.status_code == 200 and (
                not self._streams or text.rstrip().endswith("data: [DONE]")
            ):
                self.answered += 1
            else:
                self.refused.append(f"{answer.status_code} {text[-200:]}")


@contextmanager
def streaming(
    http: httpx.Client, prompt: str, max_tokens: int, salt: str | None = None
) -> Iterator[Iterator[str]]:
    """The data of a streamed answer's events, as they come."""
    with http.stream(
        "POST", CHAT, json=request(prompt, max_tokens, salt, stream=True), timeout=120
    ) as answer:
        assert answer.status_code == 200
        yield (line.removeprefix("data: ") for line in answer.iter_lines() if line)


# The promise is for 50 prompts (PROOFLINE_TEST_PROMPTS=50); the suite asks a minute's worth.
PROMPTS = prompts(int(os.environ.get("PROOFLINE_TEST_PROMPTS", "6")))
LONG_PROMPT = prompts(1, least_tokens=400, seed=2)[0]  # three whole blocks of cache

# Tokens of a small cache: chat uses each block again and again, also those a proof would write to.
CACHE_TOKENS = 5120
# tokens of a micro-batch, which without isolation writes to the first blocks of that cache
UNISOLATED_TOKENS = 4096
CPU_BLOCK, GPU_BLOCK = 128, 16  # tokens, as vLLM has them by default
READY_S = 400.0


def vllm_args() -> list[str]:
    """Arguments for engines with that cache; on a shared GPU, with part of its memory."""
    args = ["--enable-prompt-tokens-details"]
    if not visible_gpus() or vllm_runs_on_cpu():
        return [*args, "--num-gpu-blocks-override", str(CACHE_TOKENS // CPU_BLOCK)]
    args += ["--enforce-eager", "--gpu-memory-utilization", "0.15"]
    return [*args, "--num-gpu-blocks-override", str(CACHE_TOKENS // GPU_BLOCK)]


class SwitchableStack(Stack):
    """A stack whose workers' isolation can be switched off."""

    def worker_command(self) -> list[str]:
        return unisolated.command(super().worker_command())


@contextmanager
def switchable_stack(switch: Path, **env: str) -> Iterator[StackClient]:
    """A stack of one real engine that isolates chat from proofs while there is no file `switch`.

    Its logprobs call tokens by their texts.

    In float32, so that batching does not blur what is compared.
    """
    log: deque[str] = deque(maxlen=LOG_LINES)
    stack = SwitchableStack(
        EngineOptions(
            model=MODEL,
            dtype="float32",
            max_batch_tokens=UNISOLATED_TOKENS,
            logprob_tokens="text",
            vllm_args=tuple(vllm_args()),
        ),
        env={**FAST, unisolated.SWITCH: str(switch), **env},
        on_line=lambda name, line: log.append(f"{name} | {line}"),
        announce=lambda message: log.append(f"stack | {message}"),
    )
    limits = httpx.Limits(max_connections=None)
    with (
        stack,
        httpx.Client(base_url=stack.base_url, timeout=300, limits=limits, trust_env=False) as http,
    ):
        stack.wait_ready(READY_S)
        yield StackClient(stack, http, log)


@contextmanager
def round_beside(client: RoundClient, least_nonces: int = 20) -> Iterator[None]:
    """A round that has begun when the body runs, and is over after it."""
    client.start(None, params={"model": client.model, "seq_len": 256})
    try:
        client.wait_progress(least_nonces)
        yield
    finally:
        client.stop()
        client.wait_settled()
