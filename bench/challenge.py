"""Twenty hours of a PoC challenge in some minutes: what grows, what slows down, what is lost.

    .venv/bin/python -m bench.challenge --segments 240

Each segment is a round with its own hash, nonces and url. Receivers answer late, some with 503 at
first. Every nonce that arrives is counted, and its value computed again. With --engine vllm the
engines are tiny models, and a sample of the values is computed again; an hour of them:
--engine vllm --segments 240 --seconds 15.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import httpx
import numpy as np
import redis
import typer

from bench.faults.reference import Reference
from bench.faults.usage import uses_of
from bench.harness import machine
from bench.harness.chat_load import Threads
from bench.harness.report import judged, measures, run, say
from bench.segments import Segment
from cli.model_choice import with_chosen_model
from poc_core.errors import OptionsError
from poc_core.state import keys
from poc_core.state.history import STEPS
from tests.stacks.round_client import MODEL, RoundClient, StackClient, running_stack
from workers.engines.options import EngineOptions
from workers.load import load_engine

READY_TIMEOUT_S = 600.0
STEP_MS = 25.0  # of a synthetic micro-batch of 32 nonces
INTERVAL_S = 0.25  # between two callbacks of a round
# Nonces of a segment whose values are computed again with a model.
SAMPLE = 8
# Segments at each end whose pace is compared, by their medians.
ENDS = 24
MOST_SLOWER = 0.02
# The growth over all segments that still counts as flat: these numbers, or this part of the first
# figure if that is more. A worker's pool of connections opens up to six at a time, maybe late.
MOST_GROWN = {"keys": 10.0, "MiB": 4.0, "descriptors": 8.0}
MOST_PART_GROWN = 0.02
# Keys that count what happened in some seconds, and the most of them: each has its own TTL.
COUNTERS = ("poc:past:", "poc:stats:by:")
MOST_COUNTERS = sum(kept_s // step_s + 2 for step_s, kept_s in STEPS.items()) + 62
DELIVERY_S = 60.0
NO_TTL = -1  # Redis' answer
# The answer of a node with POC_CHAT_POLICY=exclusive during a round.
REFUSED = "PoC generation is active"
CHAT_PAUSE_S, CHAT_TIMEOUT_S = 0.5, 120.0


class Engine(StrEnum):
    SYNTHETIC = "synthetic"
    VLLM = "vllm"


class Chat(StrEnum):
    NONE = "none"
    BESIDE = "beside"
    REFUSED = "refused"


@dataclass
class Found:
    """The figures of all segments so far."""

    paces: list[float] = field(default_factory=list)
    looks: list[dict[str, float]] = field(default_factory=list)  # after each segment
    n_nonces: int = 0
    counters: int = 0  # the most keys of counters at once
    problems: list[str] = field(default_factory=list)

    def per_segment(self) -> dict[str, float]:
        """Returns the growth per segment of each figure, without the first quarter of segments.

        The growth is the slope of the line fitted by least squares. Figures that a look lacks are
        left out.
        """
        looks = self.looks[len(self.looks) // 4 :]
        names = set(looks[0]).intersection(*looks)
        return {name: _slope([look[name] for look in looks]) for name in sorted(names)}


def _slope(figures: Sequence[float]) -> float:
    return float(np.polyfit(range(len(figures)), figures, 1)[0]) if len(figures) > 1 else 0.0


@dataclass(frozen=True)
class Node:
    """The node with access to its API, its Redis and its processes."""

    client: StackClient
    connection: Any  # of Redis
    reference: Reference
    n_values: int | None

    def run(self, segments: int, seconds: float, found: Found) -> None:
        waiting: list[Segment] = []
        for number in range(1, segments + 1):
            segment = Segment(number)
            found.paces.append(segment.run(self.client, self.connection, seconds))
            waiting.append(segment)
            self._look(number, found)
            for one in [one for one in waiting[:-1] if self._is_forgotten(one)]:
                waiting.remove(one)
                self._close(one, found)
        self._settle(waiting, found)

    def _look(self, number: int, found: Found) -> None:
        names = (key.decode() for key in self.connection.scan_iter())
        counters = sum(name.startswith(COUNTERS) for name in names)
        found.counters = max(found.counters, counters)
        figures = {"keys": float(self.connection.dbsize() - counters)}
        for use in uses_of(self.client.children()):
            figures[f"MiB of {use.name}"] = use.rss / 2**20
            figures[f"descriptors of {use.name}"] = float(use.descriptors)
        found.looks.append(figures)
        outboxes = [keys.outbox(one.decode()) for one in self._due()]
        n_bytes = sum(int(self.connection.hget(one, "bytes") or 0) for one in outboxes)
        shown = ", ".join(f"{name} {figure:.0f}" for name, figure in figures.items())
        say(
            f"{number}: {found.paces[-1]:.0f} nonces/s, {counters} keys of counters,"
            f" {self.client.status()['callbacks_waiting']} outboxes with {n_bytes} bytes, {shown}"
        )

    def _due(self) -> list[bytes]:
        """Returns the ids of outboxes with undelivered entries."""
        ids: list[bytes] = self.connection.zrange(keys.OUTBOX_DUE, 0, -1)
        return ids

    def _is_forgotten(self, segment: Segment) -> bool:
        return not self.connection.exists(keys.round(segment.round_id))

    def _close(self, segment: Segment, found: Found) -> None:
        n, problems = segment.close(self.reference.artifacts, self.n_values)
        found.n_nonces += n
        found.problems += problems

    def _settle(self, waiting: list[Segment], found: Found) -> None:
        """Waits until the last segment is delivered, and the others are forgotten."""
        *others, last = waiting
        try:
            self.client.wait(
                lambda: last.is_over(self.connection) and all(map(self._is_forgotten, others)),
                DELIVERY_S,
                "all segments delivered, and all except the last forgotten",
            )
        except AssertionError as error:
            found.problems.append(str(error))
        for segment in waiting:
            self._close(segment, found)
        left = sorted(name for name in self._of_segments() if last.round_id not in name)
        if left:
            found.problems.append(f"{len(left)} keys are left of other segments: {left[:5]}")
        if for_ever := sorted(self._everlasting()):
            found.problems.append(f"{len(for_ever)} keys have no TTL: {for_ever[:5]}")

    def _everlasting(self) -> Iterator[str]:
        """Yields the node's keys without a TTL, except the deployment."""
        for key in self.connection.scan_iter("poc:*"):
            if self.connection.ttl(key) == NO_TTL and key.decode() != keys.DEPLOYMENT:
                yield key.decode()

    def _of_segments(self) -> Iterator[str]:
        """Yields the keys of rounds, outboxes and receivers, and the ids of due outboxes."""
        indexes = {keys.CURRENT_ROUND, keys.OUTBOX_DUE, keys.OUTBOX_JOBS, "poc:outbox:job_bytes"}
        for pattern in ("poc:round:*", "poc:outbox:*", "poc:receiver*"):
            for key in self.connection.scan_iter(pattern):
                if key.decode() not in indexes:
                    yield key.decode()
        for id in self._due():
            yield f"{keys.OUTBOX_DUE} has {id.decode()}"


@measures
def main(
    segments: Annotated[int, typer.Option(min=2, help="Of a challenge of 20 hours: 240.")] = 240,
    seconds: Annotated[
        float | None, typer.Option(help="Of a segment (0.8; 10 with --engine vllm).")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Of both workers.")] = Engine.SYNTHETIC,
    chat: Annotated[
        Chat, typer.Option(help="Requested meanwhile, with --engine vllm: answered, or refused.")
    ] = Chat.NONE,
) -> bool:
    """Exits with 1 if pace, memory, descriptors or keys change, or a nonce is lost or wrong."""
    if chat is not Chat.NONE and engine is not Engine.VLLM:
        raise OptionsError("A synthetic engine serves no chat: add --engine vllm.")
    seconds = seconds or {Engine.SYNTHETIC: 0.8, Engine.VLLM: 10.0}[engine]
    say(f"{machine.describe()}; {segments} segments of {seconds:g} s")
    found, meter, began = Found(), machine.UsageMeter(), time.monotonic()
    with node(engine, chat) as running, chatting(chat, running.client, found):
        running.run(segments, seconds, found)
    others = meter.read().others
    say(f"{time.monotonic() - began:.0f} s with the start; other programs used {others:.2f} cores")
    return report(found)


class AskedChat(Threads):
    """A client that requests one short answer after the other, and counts the outcomes."""

    def __init__(self, client: RoundClient) -> None:
        super().__init__(1)
        self.counts: Counter[str] = Counter()
        self._client = client

    def run(self, number: int) -> None:
        url, model = self._client.base_url, self._client.model
        body = {"model": model, "prompt": "the sea", "max_tokens": 16, "ignore_eos": True}
        with httpx.Client(base_url=url, timeout=CHAT_TIMEOUT_S, trust_env=False) as http:
            while not self._stop.wait(CHAT_PAUSE_S):
                try:
                    answer = http.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.counts[f"failed ({type(error).__name__})"] += 1
                    continue
                is_refused = answer.status_code == 503 and REFUSED in answer.text
                outcome = "refused" if is_refused else f"failed ({answer.status_code})"
                self.counts["answered" if answer.status_code == 200 else outcome] += 1


@contextmanager
def chatting(chat: Chat, client: RoundClient, found: Found) -> Iterator[None]:
    """Requests chat in the meantime, if wanted, and adds wrong outcomes to the problems."""
    if chat is Chat.NONE:
        yield
        return
    with AskedChat(client) as asking:
        yield
    say(f"chat: {dict(asking.counts)}")
    allowed = {"answered"} if chat is Chat.BESIDE else {"answered", "refused"}
    found.problems += [
        f"chat was {outcome} {n} times"
        for outcome, n in asking.counts.items()
        if outcome not in allowed
    ]
    if chat is Chat.REFUSED and not asking.counts["refused"]:
        found.problems.append("chat was never refused")


@contextmanager
def node(engine: Engine, chat: Chat) -> Iterator[Node]:
    options: dict[str, Any] = {"engine": engine.value, "synthetic_step_ms": STEP_MS}
    second: dict[str, Any] = {"synthetic_step_ms": 0.0}
    if engine is Engine.VLLM:
        options |= {"dtype": "float32", "vllm_args": ("--enforce-eager",)}
        second = {"engine": "transformers", "vllm_args": ()}
    env = {
        "POC_CALLBACK_INTERVAL_SEC": str(INTERVAL_S),
        "POC_CHAT_POLICY": "exclusive" if chat is Chat.REFUSED else "yield",
    }
    same = with_chosen_model(EngineOptions(**{"model": MODEL} | options | second))
    with ExitStack() as exits:
        client = exits.enter_context(running_stack(env, READY_TIMEOUT_S, **options))
        yield Node(
            client,
            exits.enter_context(redis.Redis.from_url(client.redis_url)),
            exits.enter_context(Reference(partial(load_engine, same), 1)),
            None if engine is Engine.SYNTHETIC else SAMPLE,
        )


def report(found: Found) -> bool:
    """Prints the problems and a verdict for each target; returns whether all targets are met."""
    first, last = (statistics.median(paces) for paces in (found.paces[:ENDS], found.paces[-ENDS:]))
    for problem in found.problems:
        say(f"[red]{problem}[/]")
    checks = [
        judged(
            abs(last / first - 1) <= MOST_SLOWER,
            f"pace: {last:.1f} nonces/s of the last {ENDS} over {first:.1f} of the first,"
            f" {last / first - 1:+.2%}",
        ),
        judged(
            not found.problems,
            f"nonces and keys: {found.n_nonces:,} nonces came, {len(found.problems)} problems"
            " (a nonce lost, doubled or wrong, or a key that is left)",
        ),
        judged(
            found.counters <= MOST_COUNTERS,
            f"counters: {found.counters} keys at most, of {MOST_COUNTERS} that their times allow",
        ),
        *(_is_flat(kind, found, most) for kind, most in MOST_GROWN.items()),
    ]
    return all(checks)


def _is_flat(kind: str, found: Found, most: float) -> bool:
    """Prints the growth of each figure of a kind; returns whether none grew."""
    shown, flat = [], True
    for name, slope in found.per_segment().items():
        if name.startswith(kind):
            by, first = slope * len(found.paces), found.looks[0].get(name, 0.0)
            is_flat = by <= max(most, MOST_PART_GROWN * first)
            shown.append(f"{name} {'flat' if is_flat else 'grew'} ({first:.0f}, {by:+.1f})")
            flat &= is_flat
    return judged(flat, f"over all segments: {', '.join(shown)}")


if __name__ == "__main__":
    run(main)
