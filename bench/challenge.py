"""Twenty hours of a PoC challenge in some minutes: what grows, what slows down, what is lost.

    .venv/bin/python -m bench.challenge --segments 240

One segment follows another, each a round with a new hash, other nonces and a new url; receivers
answer late, and some say 503 at first. Every nonce that arrives is counted, and its value computed
again. With --engine vllm the engines are real tiny ones, and a sample of the values is computed
again; an hour of them: --engine vllm --segments 240 --seconds 15.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import redis
import typer

from bench.faults.reference import Reference
from bench.faults.usage import uses_of
from bench.harness import machine
from bench.harness.asked_chat import AskedChat
from bench.harness.growth import Growth
from bench.harness.report import console, exit_with
from bench.harness.segments import Segment
from cli.model_choice import with_chosen_model
from poc_core.errors import OptionsError
from poc_core.state import keys
from poc_core.state.past.history import STEPS
from tests.stacks.round_client import MODEL, RoundClient, StackClient, running_stack
from workers.engines.options import EngineOptions
from workers.load import load_engine

READY_TIMEOUT_S = 600.0
STEP_MS = 25.0  # of a synthetic micro-batch of 32 nonces
INTERVAL_S = 0.25  # between two callbacks of a round
# Nonces of a segment whose values are computed again where that takes a model.
SAMPLE = 8
# Segments at either end whose pace is compared, by their medians.
ENDS = 24
MOST_SLOWER = 0.02
# By how much a figure may grow over all segments and be flat: by the line that is fitted to all but
# the first quarter; or by what part of the first figure, where that is more. A worker's pool of
# connections opens up to six when it first does so much at once, maybe late.
MOST_GROWN = {"keys": 10.0, "MiB": 4.0, "descriptors": 8.0}
MOST_PART_GROWN = 0.02
# Keys that count what happened in some seconds, each for a time of its own: so many at most.
COUNTERS = ("poc:past:", "poc:stats:by:")
MOST_COUNTERS = sum(kept_s // step_s + 2 for step_s, kept_s in STEPS.items()) + 62
DELIVERY_S = 60.0
NO_TTL = -1  # as Redis says it


class Engine(StrEnum):
    SYNTHETIC = "synthetic"
    VLLM = "vllm"


class Chat(StrEnum):
    NONE = "none"
    BESIDE = "beside"
    REFUSED = "refused"


@dataclass
class Found:
    """What is known so far."""

    paces: list[float] = field(default_factory=list)
    growth: Growth = field(default_factory=Growth)
    n_nonces: int = 0
    counters: int = 0  # the most keys of counters that were seen at once
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Node:
    """The node, as who asks and who looks behind it sees it."""

    client: StackClient
    connection: redis.Redis
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
        counters = sum(1 for key in self._redis.scan_iter() if key.decode().startswith(COUNTERS))
        found.counters = max(found.counters, counters)
        figures = {"keys": float(self._redis.dbsize() - counters)}
        for use in uses_of(self.client.children()):
            figures[f"MiB of {use.name}"] = use.rss / 2**20
            figures[f"descriptors of {use.name}"] = float(use.descriptors)
        found.growth.look(figures)
        status = self.client.status()
        told = [
            f"{number}: {found.paces[-1]:.0f} nonces/s",
            f"{figures['keys']:.0f} keys and {counters} of counters",
            f"{status['callbacks_waiting']} outboxes with {self._waiting_bytes()} bytes",
            *(f"{name} {figure:.0f}" for name, figure in figures.items() if name != "keys"),
        ]
        console.print(", ".join(told), highlight=False, soft_wrap=True)

    @property
    def _redis(self) -> Any:
        return self.connection

    def _waiting_bytes(self) -> int:
        ids = self._redis.zrange(keys.OUTBOX_DUE, 0, -1)
        return sum(int(self._redis.hget(keys.outbox(id.decode()), "bytes") or 0) for id in ids)

    def _is_forgotten(self, segment: Segment) -> bool:
        return not self._redis.exists(keys.round(segment.round_id))

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
                "all segments delivered, and all but the last forgotten",
            )
        except AssertionError as error:
            found.problems.append(str(error))
        for segment in waiting:
            self._close(segment, found)
        kept = sorted(name for name in self._kept() if last.round_id not in name)
        if kept:
            found.problems.append(f"{len(kept)} keys are left of other segments: {kept[:5]}")
        if for_ever := sorted(self._everlasting()):
            found.problems.append(f"{len(for_ever)} keys have no TTL: {for_ever[:5]}")

    def _everlasting(self) -> Iterator[str]:
        """Keys of ours that no time ends, but for what the node shall run."""
        for key in self._redis.scan_iter("poc:*"):
            if self._redis.ttl(key) == NO_TTL and key.decode() != keys.DEPLOYMENT:
                yield key.decode()

    def _kept(self) -> Iterator[str]:
        """What there is of segments: keys, and ids in the indexes of rounds and outboxes."""
        ours = {keys.CURRENT_ROUND, keys.OUTBOX_DUE, keys.OUTBOX_JOBS, "poc:outbox:job_bytes"}
        for pattern in ("poc:round:*", "poc:outbox:*", "poc:receiver*"):
            for key in self._redis.scan_iter(pattern):
                if (name := key.decode()) not in ours:
                    yield name
        for id in self._redis.zrange(keys.OUTBOX_DUE, 0, -1):
            yield f"{keys.OUTBOX_DUE} has {id.decode()}"


def main(
    segments: Annotated[int, typer.Option(min=2, help="Of a challenge of 20 hours: 240.")] = 240,
    seconds: Annotated[
        float | None, typer.Option(help="Of a segment (0.8; 10 with --engine vllm).")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Of both workers.")] = Engine.SYNTHETIC,
    chat: Annotated[
        Chat, typer.Option(help="Asked meanwhile, with --engine vllm: answered, or refused.")
    ] = Chat.NONE,
) -> None:
    """Exits with 1 where pace, memory, descriptors or keys do not stay, or a nonce is amiss."""
    seconds = seconds or {Engine.SYNTHETIC: 0.8, Engine.VLLM: 10.0}[engine]
    exit_with(partial(measure, segments, seconds, engine, chat))


def measure(segments: int, seconds: float, engine: Engine, chat: Chat) -> bool:
    if chat is not Chat.NONE and engine is not Engine.VLLM:
        raise OptionsError("A synthetic engine serves no chat: add --engine vllm.")
    console.print(f"{machine.describe()}; {segments} segments of {seconds:g} s", highlight=False)
    found, meter, began = Found(), machine.UsageMeter(), time.monotonic()
    with node(engine, chat) as running, asked(chat, running.client, found):
        running.run(segments, seconds, found)
    console.print(
        f"{time.monotonic() - began:.0f} s with the start; other programs used"
        f" {meter.read().others:.2f} cores",
        highlight=False,
    )
    return report(found)


@contextmanager
def asked(chat: Chat, client: RoundClient, found: Found) -> Iterator[None]:
    """Asks for chat meanwhile, where wanted, and judges what was said."""
    if chat is Chat.NONE:
        yield
        return
    with AskedChat(client.base_url, client.model) as asking:
        yield
    console.print(f"chat: {dict(asking.counts)}", highlight=False)
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
    """Says what holds and what does not; whether all does."""
    first, last = (statistics.median(paces) for paces in (found.paces[:ENDS], found.paces[-ENDS:]))
    checks = [
        (
            f"pace: {last:.1f} nonces/s of the last {ENDS} over {first:.1f} of the first,"
            f" {last / first - 1:+.2%}",
            abs(last / first - 1) <= MOST_SLOWER,
        ),
        (
            f"nonces and keys: {found.n_nonces:,} nonces came, {len(found.problems)} problems"
            " (one lost, doubled or wrong, or a key that is left)",
            not found.problems,
        ),
        (
            f"counters: {found.counters} keys at most, of {MOST_COUNTERS} that their times allow",
            found.counters <= MOST_COUNTERS,
        ),
        *(_flat(kind, found, most) for kind, most in MOST_GROWN.items()),
    ]
    for problem in found.problems:
        console.print(f"[red]{problem}[/]", highlight=False, soft_wrap=True)
    for said, holds in checks:
        word = "[bold green]PASS[/]" if holds else "[bold red]FAIL[/]"
        console.print(f"{word} {said}", highlight=False, soft_wrap=True)
    return all(holds for _, holds in checks)


def _flat(kind: str, found: Found, most: float) -> tuple[str, bool]:
    """Whether figures of a kind stay, and what is flat of them and what grew, and by how much."""
    told, holds = [], True
    for name, each in found.growth.per_segment().items():
        if not name.startswith(kind):
            continue
        by, first = each * len(found.paces), found.growth.looks[0].get(name, 0.0)
        flat = by <= max(most, MOST_PART_GROWN * first)
        told.append(f"{name} {'flat' if flat else 'grew'} ({first:.0f}, {by:+.1f})")
        holds &= flat
    return f"over all segments: {', '.join(told)}", holds


if __name__ == "__main__":
    typer.run(main)
