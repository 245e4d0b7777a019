"""Clients of chat: streamed answers timed token by token, overlapping, random or slowly read."""

import json
import random
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httpx
import numpy as np

from poc_core.errors import ProoflineError

PATH = "/v1/chat/completions"
TIMEOUT_S = 120.0
_WORDS = "the sea and wind over a field of grass while ships go by"
SLOW_READERS = 4
_RECEIVE_BYTES = 4096


class ChatError(ProoflineError):
    """A chat request of the benchmark did not get its complete answer."""


class Timed(NamedTuple):
    """A streamed answer as its client saw it."""

    first_token_s: float
    token_s: float  # mean time per token after the first
    ended_at: float  # time.monotonic() of the last token


class Token(NamedTuple):
    """A token of an answer as its client saw it."""

    at: float  # time.monotonic()
    after_s: float  # since the previous token; for the first token since the request
    is_first: bool


class Percentiles(NamedTuple):
    """Percentiles in milliseconds."""

    p50: float
    p95: float

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p95:.1f}"


def percentiles(seconds: Iterable[float]) -> Percentiles:
    return Percentiles(*np.percentile([1000 * value for value in seconds], (50, 95)).tolist())


def prompt(rng: random.Random, n_words: int) -> str:
    return " ".join(rng.choices(_WORDS.split(), k=n_words))


def body_of(model: str, text: str, n_tokens: int, **more: Any) -> dict[str, Any]:
    """Returns the request for a streamed answer of exactly `n_tokens` tokens."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }


def stream(
    http: httpx.Client, model: str, text: str, n_tokens: int, tokens: list[Token] | None = None
) -> Timed:
    """Reads one answer of exactly `n_tokens` tokens; adds each token to `tokens` as it comes.

    ChatError: the request was refused or broken off, or the answer has another number of tokens.
    """
    body = body_of(model, text, n_tokens, stream_options={"include_usage": True})
    began, first_at, last_at, usage, done = time.monotonic(), 0.0, 0.0, "", False
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
                    usage = line
                done = done or line == "data: [DONE]"
    except httpx.HTTPError as error:
        raise ChatError(f"broken off: {error!r}") from error
    if not done or f'"completion_tokens":{n_tokens}' not in usage:
        raise ChatError(f"incomplete: {usage or 'no usage'}")
    return Timed(first_at - began, (last_at - first_at) / max(1, n_tokens - 1), last_at)


def one_by_one(http: httpx.Client, model: str, n: int, n_tokens: int, seed: int) -> list[Timed]:
    """Reads `n` answers in turn, with pauses in which a round's micro-batches run."""
    rng = random.Random(seed)
    answers = []
    for _ in range(n):
        time.sleep(rng.uniform(0.1, 0.4))
        answers.append(stream(http, model, prompt(rng, rng.randint(5, 60)), n_tokens))
    return answers


def arriving(
    http: httpx.Client, model: str, n: int, n_tokens: int, per_second: float, seed: int
) -> list[Timed]:
    """Reads `n` answers to requests that come at random (Poisson), about `per_second`."""
    rng = random.Random(seed)
    with ThreadPoolExecutor(64) as pool:
        futures = []
        for _ in range(n):
            time.sleep(rng.expovariate(per_second))
            text = prompt(rng, rng.randint(5, 60))
            futures.append(pool.submit(stream, http, model, text, n_tokens))
    return [future.result() for future in futures]


class Threads(ABC):
    """Threads that run until the context ends, as a context manager."""

    def __init__(self, n: int) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self.run, args=(n,)) for n in range(n)]

    @abstractmethod
    def run(self, number: int) -> None:
        """Runs in each thread, and returns soon after `_stop` is set."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
            time.sleep(0.2)  # out of step with each other
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class ConstantChat(Threads):
    """Clients whose answers overlap, so that chat is never idle."""

    def __init__(
        self, http: httpx.Client, model: str, n_threads: int = 3, n_tokens: int = 200
    ) -> None:
        super().__init__(n_threads)
        self.problems: list[str] = []
        self.tokens: list[Token] = []
        self._http, self._model, self._n_tokens = http, model, n_tokens

    def run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            n_tokens = rng.randint(self._n_tokens // 2, self._n_tokens)
            try:
                stream(self._http, self._model, prompt(rng, 20), n_tokens, self.tokens)
            except ChatError as error:
                self.problems.append(str(error))


class SlowReaders(Threads):
    """Clients that read a byte a second of long answers."""

    def __init__(self, base_url: str, model: str) -> None:
        super().__init__(SLOW_READERS)
        parts = urlsplit(base_url)
        self._address = (parts.hostname or "", parts.port or 80)
        # With 20 logprobs per token an answer is a few megabytes: more than sockets and servers
        # buffer for a client.
        self._body = body_of(model, "Tell me all.", 1000, logprobs=True, top_logprobs=20)
        self._n_ended = 0

    def wait_until_generated(self, http: httpx.Client) -> None:
        """Returns when a client that reads without pauses has read the same answer."""
        with http.stream("POST", PATH, json=self._body, timeout=300) as answer:
            for _ in answer.iter_raw():
                pass

    def still_reading(self) -> int:
        """Returns the number of clients whose answer has not ended."""
        return SLOW_READERS - self._n_ended

    def run(self, number: int) -> None:
        try:
            self._read()
        finally:
            self._n_ended += 1

    def _read(self) -> None:
        body = json.dumps(self._body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            client.connect(self._address)
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not self._stop.wait(1.0) and client.recv(1):
                pass


@dataclass
class Soak:
    """Requests that come at random, of random lengths, for a while."""

    answered: int = 0
    problems: list[str] = field(default_factory=list)

    def run(
        self, http: httpx.Client, model: str, seconds: float, per_second: float, seed: int
    ) -> None:
        """Sends requests as many independent clients would (Poisson), at times in bursts.

        Times and lengths are the same in every run; only the prompts depend on `seed`.
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
        errors = [error for future in futures if (error := future.exception()) is not None]
        self.answered += len(futures) - len(errors)
        self.problems += map(str, errors)
