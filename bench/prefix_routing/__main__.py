"""What it is worth to keep a conversation on the engine that has its prefix.

    .venv/bin/python -m bench.prefix_routing

Conversations of several turns at random times on four real tiny engines: through an API that
sends each request where its prefix is, through one that sends it to the least busy worker, and on
one engine with four times the cache. Tells the prefix caches' hit rate and how long the first
token of later turns takes. With --kill an engine is killed in the middle of a further run: an
answer that this breaks off is asked for again, as its error says. Told is for each turn that went
to another engine why it did: only the killed engine's conversations move, and those whose engine
has its share of the requests under way.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.chat_load import ChatError, Timed, prompt, stream
from bench.harness.report import console, exit_with, verdict
from bench.prefix_routing.noted import Move, Why, moves
from cli.supervise.redis_server import free_port
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

ENGINES = 4
TOKENS = 16  # of an answer
WORDS = 40  # of a user's message
READY_TIMEOUT_S = 600.0
# Of one engine with the cache of all four.
LEAST_HIT_RATE = 0.9
# Of the median time to the first token, over that of the least busy engine.
MOST_FIRST_TOKEN = 0.75
# Of a turn, until its conversation counts as failed.
MOST_TRIES = 5
# Of the prompt of the turn before: a turn that finds less in the cache has moved.
STAYED = 0.5
# An API as it was: each request goes to the least busy worker.
LEAST_BUSY = """
from api.chat.gateway import Gateway
Gateway.by_prefix = lambda self, workers, prefix: self.by_load(workers)
from cli.main import app
app()
"""


@dataclass(frozen=True)
class Run:
    """What clients and caches saw of all conversations."""

    hit_rate: float
    first_token_ms: float  # the median of turns after the first
    again: int  # requests that were broken off or refused, and sent again
    failed: int  # conversations without an answer to every turn
    moved: int  # conversations of which a turn did not find the prefix of the turn before


@dataclass(frozen=True)
class Talk:
    """Conversations as they are sent."""

    conversations: int
    turns: int
    at_once: int
    pause_s: float  # between an answer and the next turn, in the mean

    def hold(self, http: httpx.Client, model: str, salt: str) -> Run:
        """Sends all conversations, whose texts follow from `salt`."""
        with ThreadPoolExecutor(self.at_once) as pool:
            held = list(
                pool.map(
                    lambda n: self._converse(http, model, random.Random(f"{salt}-{n}")),
                    range(self.conversations),
                )
            )
        answers = [answer for answers, _ in held for answer in answers]
        later = [answer.first_token_s for answers, _ in held for answer in answers[1:]]
        return Run(
            sum(answer.cached_tokens for answer in answers)
            / sum(answer.prompt_tokens for answer in answers),
            1000 * statistics.median(later),
            again=sum(again for _, again in held),
            failed=sum(len(answers) < self.turns for answers, _ in held),
            moved=sum(_moved(answers) for answers, _ in held),
        )

    def _converse(
        self, http: httpx.Client, model: str, rng: random.Random
    ) -> tuple[list[Timed], int]:
        """The answers up to the first turn without one, and how many requests were sent again."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer in short words."}]
        answers: list[Timed] = []
        again = 0
        for _ in range(self.turns):
            time.sleep(rng.expovariate(1 / self.pause_s))
            messages.append({"role": "user", "content": prompt(rng, WORDS)})
            answer, tries = _answer(http, model, messages)
            again += tries - 1
            if answer is None:
                break
            answers.append(answer)
            messages.append({"role": "assistant", "content": prompt(rng, TOKENS)})
        return answers, again


def _answer(
    http: httpx.Client, model: str, messages: list[dict[str, Any]]
) -> tuple[Timed | None, int]:
    """A turn's answer, None without one, and how often it was asked for."""
    for tries in range(1, MOST_TRIES + 1):
        try:
            return stream(http, model, messages, TOKENS), tries
        except ChatError as error:
            console.print(f"[red]{error}[/]")
            time.sleep(1.0)
    return None, MOST_TRIES


def _moved(answers: Sequence[Timed]) -> bool:
    return any(
        later.cached_tokens < STAYED * before.prompt_tokens for before, later in pairwise(answers)
    )


def main(
    conversations: Annotated[int, typer.Option(min=8)] = 200,
    turns: Annotated[int, typer.Option(min=2)] = 8,
    at_once: Annotated[int, typer.Option(help="Conversations under way.")] = 24,
    pause_s: Annotated[float, typer.Option(help="Mean pause before a turn.")] = 2.0,
    blocks: Annotated[int, typer.Option(help="Blocks of 32 tokens in an engine's cache.")] = 400,
    kill: Annotated[bool, typer.Option(help="Kill an engine in a further run.")] = False,
) -> None:
    """Compares three ways to serve the same conversations."""
    talk = Talk(conversations, turns, at_once, pause_s)
    exit_with(lambda: measure(talk, blocks, kill))


def measure(talk: Talk, blocks: int, kill: bool) -> bool:
    console.print(f"{machine.describe()}; {talk}", highlight=False)
    found: dict[str, Run] = {}
    moved: list[Move] = []
    with _stack(ENGINES, blocks) as stack:
        with _api(stack, "-c", LEAST_BUSY) as url:
            found["least busy of four"] = _run(talk, stack, url, "least")
        with _noting_api(stack, moved) as url:
            found["by prefix, four"] = _run(talk, stack, url, "prefix")
        stay = only_with_reason("four", moved, gone=0)
        if kill:
            moved.clear()
            with _noting_api(stack, moved) as url:
                found["by prefix, one killed"] = _run(talk, stack, url, "kill", kill=True)
            stay &= only_with_reason("one killed", moved, gone=1)
    with _stack(1, ENGINES * blocks) as stack:
        found["one engine, four times the cache"] = _run(talk, stack, stack.base_url, "one")
    table = Table(title="Conversations")
    for heading in ("", "hit rate", "first token ms", "asked again", "failed", "moved"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, run in found.items():
        counts = map(str, (run.again, run.failed, run.moved))
        table.add_row(name, f"{run.hit_rate:.3f}", f"{run.first_token_ms:.1f}", *counts)
    console.print(table)
    least, prefix, one = (
        found["least busy of four"],
        found["by prefix, four"],
        found["one engine, four times the cache"],
    )
    hits = verdict("hit rate over one engine's", prefix.hit_rate / one.hit_rate, LEAST_HIT_RATE)
    first = prefix.first_token_ms / least.first_token_ms
    quick = verdict("first token, saved over the least busy's", 1 - first, 1 - MOST_FIRST_TOKEN)
    return hits and quick and stay and not any(run.failed for run in found.values())


def only_with_reason(name: str, found: Sequence[Move], gone: int) -> bool:
    """Says why turns went to other engines; whether each had a reason, and `gone` engines ended."""
    for why in Why:
        of_it = [move.conversation for move in found if move.why is why]
        console.print(
            f"{name}: {len(of_it)} turns of {len(set(of_it))} conversations moved: {why}",
            highlight=False,
        )
    ended = {move.worker for move in found if move.why is Why.GONE}
    strange = Counter(move.why for move in found)[Why.OTHER]
    passed = strange == 0 and len(ended) <= gone
    word = "[bold green]PASS[/]" if passed else "[bold red]FAIL[/]"
    said = f"{strange} turns moved for no reason, and engines were gone: {len(ended)} of {gone}"
    console.print(f"{word} {name}: {said}\n", highlight=False)
    return passed


def _run(talk: Talk, stack: Stack, url: str, salt: str, kill: bool = False) -> Run:
    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=url, timeout=120, limits=limits, trust_env=False) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        if kill:
            pool.submit(_kill_later, stack, talk.turns * talk.pause_s)
        began = time.monotonic()
        run = talk.hold(http, stack.model_name, salt)
    console.print(f"{salt}: {run} in {time.monotonic() - began:.0f} s", highlight=False)
    return run


def _kill_later(stack: Stack, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(stack.worker_pids()[0], signal.SIGKILL)


@contextmanager
def _stack(workers: int, blocks: int) -> Iterator[Stack]:
    args = (
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        "--num-gpu-blocks-override",
        str(blocks),
        "--block-size",
        "32",
    )
    options = EngineOptions(model="tiny-qwen3", vllm_args=args)
    with Stack(options, workers=workers) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        yield stack


@contextmanager
def _noting_api(stack: Stack, found: list[Move]) -> Iterator[str]:
    """An API that notes where it asks for each turn; `found` takes the moves at its end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "notes")
        with _api(stack, "-m", "bench.prefix_routing.noted", str(file)) as url:
            yield url
        found.extend(moves(file.read_text().splitlines()))


@contextmanager
def _api(stack: Stack, *words: str) -> Iterator[str]:
    """A further API of the stack, which Python runs with these words."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, *words, "api", "--port", str(port)]
    with subprocess.Popen([*command, "--redis-url", stack.redis_url or ""]) as process:
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while time.monotonic() < deadline:
                try:
                    httpx.get(f"{url}/livez", trust_env=False).raise_for_status()
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()


if __name__ == "__main__":
    typer.run(main)
