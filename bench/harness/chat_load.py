"""Chat as a benchmark's clients send it: streamed answers, timed by token, and steady traffic."""

import json
import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from poc_core.errors import ProoflineError

PATH = "/v1/chat/completions"
TIMEOUT_S = 120.0
_WORDS = (
    "the",
    "sea",
    "and",
    "wind",
    "over",
    "a",
    "field",
    "of",
    "grass",
    "while",
    "ships",
    "go",
    "by",
)


class ChatError(ProoflineError):
    """A chat request of the benchmark did not get its whole answer."""


@dataclass(frozen=True)
class Timed:
    """A streamed answer as its client saw it."""

    first_token_s: float
    token_s: float  # mean time per token after the first
    ended_at: float  # time.monotonic() of the last token
    prompt_tokens: int
    cached_tokens: int  # of the prompt; 0 without --enable-prompt-tokens-details


@dataclass(frozen=True)
class Percentiles:
    """Percentiles in milliseconds."""

    p50: float
    p95: float

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p95:.1f}"


def percentiles(seconds: Iterable[float]) -> Percentiles:
    p50, p95 = np.percentile([1000 * value for value in seconds], (50, 95))
    return Percentiles(float(p50), float(p95))


def prompt(rng: random.Random, n_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=n_words))


def stream(
    http: httpx.Client,
    model: str,
    text: str | list[Any],
    n_tokens: int,
    tokens: list["Token"] | None = None,
) -> Timed:
    """One answer of exactly `n_tokens` tokens to a text or to a conversation's messages.

    `tokens` gets each as it comes. ChatError: refused, broken off or another number of tokens.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}] if isinstance(text, str) else text,
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first_at, last_at, counted, done = time.monotonic(), 0.0, 0.0, "", False
    try:
        with http.stream("POST", PATH, json=body, timeout=TIMEOUT_S) as answer:
            if answer.status_code != 200:
                raise ChatError(f"{answer.status_code}: {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                if '"content":' in line and '"delta":{"role"' not in line:
                    before, last_at = last_at or began, time.monotonic()
                    if tokens is not None:
                        tokens.append(Token(last_at, last_at - before, not first_at))
                    first_at = first_at or last_at
                elif '"usage":{' in line:
                    counted = line
                done = done or line == "data: [DONE]"
    except httpx.HTTPError as error:
        raise ChatError(f"broken off: {error!r}") from error
    if not done or f'"completion_tokens":{n_tokens}' not in counted:
        raise ChatError(f"incomplete: {counted or 'no usage'}")
    usage = json.loads(counted.removeprefix("data: "))["usage"]
    return Timed(
        first_at - began,
        (last_at - first_at) / max(1, n_tokens - 1),
        last_at,
        usage["prompt_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def one_by_one(http: httpx.Client, model: str, n: int, n_tokens: int, seed: int) -> list[Timed]:
    """`n` answers one after the other, with pauses in which a round's micro-batches run."""
    rng = random.Random(seed)
    answers = []
    for _ in range(n):
        time.sleep(rng.uniform(0.1, 0.4))
        answers.append(stream(http, model, prompt(rng, rng.randint(5, 60)), n_tokens))
    return answers


def arriving(
    http: httpx.Client, model: str, n: int, n_tokens: int, per_second: float, seed: int
) -> list[Timed]:
    """`n` answers to requests at random (Poisson), about `per_second`, answered or not."""
    rng = random.Random(seed)
    with ThreadPoolExecutor(64) as pool:
        futures = []
        for _ in range(n):
            time.sleep(rng.expovariate(per_second))
            futures.append(
                pool.submit(stream, http, model, prompt(rng, rng.randint(5, 60)), n_tokens)
            )
    return [future.result() for future in futures]


@dataclass(frozen=True)
class Token:
    """A token of an answer as its client saw it."""

    at: float  # time.monotonic()
    after_s: float  # since the one before; of the first, since the request
    is_first: bool


class ConstantChat:
    """Context manager: answers that overlap, so that chat is never idle."""

    def __init__(
        self, http: httpx.Client, model: str, n_threads: int = 3, n_tokens: int = 200
    ) -> None:
        self.problems: list[str] = []
        self.tokens: list[Token] = []
        self._http, self._model, self._n_tokens = http, model, n_tokens
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._talk, args=(seed,)) for seed in range(n_threads)
        ]

    def __enter__(self) -> "ConstantChat":
        for thread in self._threads:
            thread.start()
            time.sleep(0.2)  # out of step with each other
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _talk(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            try:
                stream(
                    self._http,
                    self._model,
                    prompt(rng, 20),
                    rng.randint(self._n_tokens // 2, self._n_tokens),
                    self.tokens,
                )
            except ChatError as error:
                self.problems.append(str(error))


@dataclass
class Soak:
    """Requests that come at random, of random lengths, for a while."""

    answered: int = 0
    problems: list[str] = field(default_factory=list)

    def run(
        self, http: httpx.Client, model: str, seconds: float, per_second: float, seed: int
    ) -> None:
        """Requests as of many independent clients (Poisson), `per_second`, in bursts at times.

        The same ones in every run, with as many tokens; only the prompts depend on `seed`.
        """
        rng, words = random.Random(1), random.Random(seed)
        ends = time.monotonic() + seconds
        futures: list[Future[Timed]] = []
        with ThreadPoolExecutor(64) as pool:
            while time.monotonic() < ends:
                time.sleep(min(10.0, rng.expovariate(per_second / 1.5)))
                for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
                    text, n_tokens = prompt(words, rng.randint(1, 100)), rng.randint(1, 200)
                    futures.append(pool.submit(stream, http, model, text, n_tokens))
        for future in futures:
            error = future.exception()
            if error is None:
                self.answered += 1
            else:
                self.problems.append(str(error))
