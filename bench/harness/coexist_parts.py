"""What `bench.coexist` measures, part by part, each with a node under one of its policies."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from rich.table import Table

from bench.harness import machine
from bench.harness.chat_load import (
    ChatError,
    ConstantChat,
    Soak,
    Timed,
    Token,
    arriving,
    one_by_one,
    percentiles,
)
from bench.harness.chat_node import ANSWER_TOKENS, Node, Work, rate
from bench.harness.report import LEGEND, console, verdict, warn_of_noise
from bench.harness.slow_readers import SlowReaders

T = TypeVar("T")

# Most milliseconds that a round may add to the time to the first token, by percentile.
FIRST_TOKEN_ADDED_MS = {"p50": 40.0, "p95": 70.0}
# 95th percentile of the time per token beside a round under `yield`, over that alone.
TOKEN_TARGET = 1.1
# Nonces/s beside idle chat over those without a chat server.
IDLE_TARGET = 0.99
# Seconds after the last chat token within which proofs run at full speed again.
RESUME_TARGET_S = 0.2
# Proofs' share of the time under constant chat, for `share`, and how far it may be off.
SHARE, SHARE_MARGIN = 0.3, 0.05
# Nonces/s beside clients that read nothing, over those before; a soak's last minute over its first.
STEADY_TARGET = 0.98
# A validation under constant chat: its nonces, and most of its time over that alone. Chat's mean
# time per token meanwhile over that alone.
VALIDATED, VALIDATION_TARGET, VALIDATION_TOKEN_TARGET = 200, 2.5, 2.2
# Chat requests a second in the soak.
SOAK_PER_SECOND = 1.0
# Seconds to wait before each turn until other programs are quiet.
QUIET_WAIT_S = 30.0


@dataclass(frozen=True)
class Options:
    work: Work
    requests: int
    per_second: list[float]
    repeat: int
    seconds: float
    soak_minutes: int


@dataclass(frozen=True)
class Part:
    policies: tuple[str, ...]
    run: Callable[[Node, Options], bool]


@dataclass(frozen=True)
class Turn:
    """Answers alone, then as many beside a round."""

    alone: list[Timed]
    beside: list[Timed]
    nonces_per_s: float  # beside the answers


def latency(node: Node, options: Options) -> bool:
    """Chat's times alone and beside a round."""
    table = Table(
        title=(
            f"Chat beside a round, {node.policy}, ms, p50 / p95 of {options.requests} answers or"
            " more"
        )
    )
    for heading in (
        "requests/s",
        "first token alone",
        "beside",
        "each token alone",
        "beside",
        "nonces/s",
    ):
        table.add_column(heading, justify="right")
    table.add_column("others", justify="right", style="dim")
    passed = [
        _latency(node, options, per_second, table) for per_second in options.per_second or [0.0]
    ]
    console.print(table)
    return all(passed)


def _latency(node: Node, options: Options, per_second: float, table: Table) -> bool:
    n = -(-options.requests // options.repeat)
    turns = _repeated(options, lambda index: _turn(node, n, per_second, index))
    kept = [turn.result for turn in turns if turn.counts]
    alone = [answer for turn in kept for answer in turn.alone]
    beside = [answer for turn in kept for answer in turn.beside]
    first = (
        percentiles(a.first_token_s for a in alone),
        percentiles(b.first_token_s for b in beside),
    )
    each = percentiles(a.token_s for a in alone), percentiles(b.token_s for b in beside)
    nonces = statistics.mean(turn.nonces_per_s for turn in kept)
    others = max(turn.others for turn in turns if turn.counts)
    often = f"{per_second:g} a second" if per_second else "one by one"
    table.add_row(often, *map(str, (*first, *each)), f"{nonces:.1f}", f"{others:.2f}")
    if node.policy != "yield":
        return True
    added = {"p50": first[1].p50 - first[0].p50, "p95": first[1].p95 - first[0].p95}
    passed = [
        at_most(
            f"first token, {often}: {which} beside a round, ms more than alone",
            ms,
            FIRST_TOKEN_ADDED_MS[which],
            "{:.1f}",
        )
        for which, ms in added.items()
    ]
    times = each[1].p95 / each[0].p95
    return at_most(
        f"each token, {often}: p95 beside a round, times alone", times, TOKEN_TARGET, "{:.3f}"
    ) and all(passed)


def _turn(node: Node, n: int, per_second: float, seed: int) -> Turn:
    def answers(seed: int) -> list[Timed]:
        if per_second:
            return arriving(node.http, node.model, n, ANSWER_TOKENS, per_second, seed)
        return one_by_one(node.http, node.model, n, ANSWER_TOKENS, seed)

    alone = answers(2 * seed)
    with node.round():
        began, before = time.monotonic(), node.processed()
        beside = answers(2 * seed + 1)
        return Turn(alone, beside, (node.processed() - before) / (time.monotonic() - began))


def share(node: Node, options: Options) -> bool:
    """The part of the time that proofs get under constant chat."""
    turns = _repeated(options, lambda _: _share(node, options.seconds))
    found = statistics.median(turn.result for turn in turns if turn.counts)
    listed = ", ".join(
        f"{turn.result:.3f}" if turn.counts else f"({turn.result:.3f})" for turn in turns
    )
    console.print(f"{node.policy} under constant chat, part of the time: {listed}", highlight=False)
    low, high = SHARE - SHARE_MARGIN, SHARE + SHARE_MARGIN
    return judged(low <= found <= high, f"{node.policy}: {found:.3f}, from {low:.2f} to {high:.2f}")


def _share(node: Node, seconds: float) -> float:
    with node.round(), ConstantChat(node.http, node.model) as chat:
        time.sleep(2)
        first = node.next_busy_s()
        time.sleep(seconds)
        last = node.next_busy_s()
    if chat.problems:
        raise ChatError(f"{len(chat.problems)} chat requests failed: {chat.problems[0]}")
    return rate(first, last)


def idle(node: Node, options: Options) -> bool:
    """Nonces/s beside idle chat over nonces/s of the same worker without a chat server."""
    # The same whole micro-batches on both sides; a third shows the cost of the slices' limit.
    sides = {
        "no chat server": None,
        "idle chat": 1e6,
        "idle chat, limited": options.work.max_step_ms,
    }

    def one_turn(index: int) -> dict[str, float]:
        order = list(sides) if index % 2 == 0 else list(reversed(sides))
        return {name: _nonces_per_s(node, sides[name], options.seconds) for name in order}

    turns = _repeated(options, one_turn)
    kept = [turn.result for turn in turns if turn.counts]
    table = Table(title=f"Nonces/s, {options.seconds:g} s each")
    table.add_column("worker")
    for heading in ("each turn", "median", "of no chat server"):
        table.add_column(heading, justify="right")
    ratios = {
        name: statistics.median(turn[name] / turn["no chat server"] for turn in kept)
        for name in sides
    }
    for name in sides:
        listed = " ".join(
            f"{turn.result[name]:.1f}" if turn.counts else f"({turn.result[name]:.1f})"
            for turn in turns
        )
        median = statistics.median(turn[name] for turn in kept)
        table.add_row(name, listed, f"{median:.1f}", f"{ratios[name]:.3f}")
    console.print(table)
    console.print(
        f"limited: slices of at most {options.work.max_step_ms:g} ms. {LEGEND}", highlight=False
    )
    warn_of_noise(turns)
    return verdict(
        "idle chat over no chat server, median of turns", ratios["idle chat"], IDLE_TARGET
    )


def _nonces_per_s(node: Node, chat_step_ms: float | None, seconds: float) -> float:
    """`chat_step_ms`: the limit on slices that chat asks for; None: there is no chat server."""
    with (
        _idle_chat(node, chat_step_ms) if chat_step_ms is not None else nullcontext(),
        node.round(),
    ):
        return node.nonces_per_s(seconds)


@contextmanager
def _idle_chat(node: Node, max_step_ms: float) -> Iterator[None]:
    """A chat server that has answered and answers no more."""
    port = node.stack.serve_chat(max_step_ms)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            one_by_one(http, node.model, 1, ANSWER_TOKENS, seed=0)
        yield
    finally:
        node.stack.end_chat()


def resume(node: Node, options: Options) -> bool:
    """How much time proofs lose after the last chat token before they run at full speed."""
    turns = _repeated(options, lambda index: _lost_s(node, index))
    listed = ", ".join(
        f"{turn.result:.2f}" if turn.counts else f"({turn.result:.2f})" for turn in turns
    )
    console.print(f"lost after the last token, s: {listed}", highlight=False)
    found = statistics.median(turn.result for turn in turns if turn.counts)
    return at_most("full speed after the last chat token, s lost", found, RESUME_TARGET_S, "{:.2f}")


def _lost_s(node: Node, seed: int) -> float:
    with node.round():
        steady = node.nonces_per_s(5)
        answer = one_by_one(node.http, node.model, 1, 2 * ANSWER_TOKENS, seed)[0]
        before = node.processed()
        time.sleep(2)
        after = node.next_nonces()
    # At full speed so many nonces take so long; the rest of the time was lost.
    return after.at - answer.ended_at - (after.count - before) / steady


def slow_readers(node: Node, options: Options) -> bool:
    """Nonces/s while clients read long-given answers a byte a second, over those before."""
    with node.round():
        before = node.nonces_per_s(options.seconds)
        with SlowReaders(node.stack.base_url, node.model) as readers:
            readers.wait_until_generated(node.http)
            beside = node.nonces_per_s(options.seconds)
            reading = readers.still_reading()
    console.print(
        f"{reading} clients were reading still; {before:.1f} nonces/s before, {beside:.1f} then"
    )
    return (
        verdict("nonces/s beside slow readers over those before", beside / before, STEADY_TARGET)
        and reading > 0
    )


def constant(node: Node, options: Options) -> bool:
    """A validation under chat that never pauses, and that chat, each alone and beside the other."""
    artifacts = node.compute(VALIDATED)
    alone_s, _ = _validations(node, artifacts, options.repeat)
    with ConstantChat(node.http, node.model, n_threads=8) as chat:
        time.sleep(2)
        began = time.monotonic()
        time.sleep(options.seconds)
        alone = _tokens_since(chat, began)
        began = time.monotonic()
        took_s, n_mismatch = _validations(node, artifacts, options.repeat)
        beside = _tokens_since(chat, began)
    first, each = ([_times(one, is_first) for one in (alone, beside)] for is_first in (True, False))
    console.print(
        f"{VALIDATED} nonces, {n_mismatch} mismatches, {len(chat.problems)} chat requests failed;"
        f" {alone_s:.1f} s alone, {took_s:.1f} s under chat; chat alone, beside, ms, p50 / p95:"
        f" first token {first[0]}, {first[1]}; each token {each[0]}, {each[1]}",
        highlight=False,
    )
    in_time = at_most(
        f"a validation of {VALIDATED} nonces under constant chat, times alone",
        took_s / alone_s,
        VALIDATION_TARGET,
        "{:.2f}",
    )
    mean = [
        statistics.mean(one.after_s for one in tokens if not one.is_first)
        for tokens in (alone, beside)
    ]
    tokens_in_time = at_most(
        "mean time per chat token beside a validation, times alone",
        mean[1] / mean[0],
        VALIDATION_TOKEN_TARGET,
        "{:.2f}",
    )
    return in_time and tokens_in_time and not n_mismatch and not chat.problems


def _validations(node: Node, artifacts: list[dict[str, Any]], n: int) -> tuple[float, int]:
    """Seconds of each of `n` validations, and mismatches of all."""
    began = time.monotonic()
    n_mismatch = sum(node.validate(artifacts) for _ in range(n))
    return (time.monotonic() - began) / n, n_mismatch


def _tokens_since(chat: ConstantChat, began: float) -> list[Token]:
    return [one for one in [*chat.tokens] if one.at - one.after_s >= began]


def _times(tokens: list[Token], is_first: bool) -> str:
    seconds = [one.after_s for one in tokens if one.is_first is is_first]
    return str(percentiles(seconds)) if seconds else "-"


def soak(node: Node, options: Options) -> bool:
    """Random chat beside a round, each minute alike: none refused, nothing grows or slows down."""
    if not options.soak_minutes:
        return True
    counted, used = Soak(), [machine.gpu_mib()]
    with node.round():
        marks, busy = [node.next_nonces()], [node.next_busy_s()]
        for minute in range(options.soak_minutes):
            counted.run(node.http, node.model, 60.0, SOAK_PER_SECOND, minute)
            marks.append(node.next_nonces())
            busy.append(node.next_busy_s())
            used.append(machine.gpu_mib())
            done = rate(*marks[-2:])
            console.print(
                f"minute {minute + 1}: {done:.2f} nonces/s, engine with proofs"
                f" {rate(*busy[-2:]):.3f} of the time, {counted.answered} answers, {used[-1]} MiB"
                " of GPU memory",
                highlight=False,
            )
    for problem in counted.problems[:5]:
        console.print(f"  {problem}", highlight=False)
    what = (
        f"soak of {options.soak_minutes} min, {node.policy}: {counted.answered} requests answered,"
        f" {len(counted.problems)} aborted or refused; GPU memory since the first minute:"
        f" {used[-1] - used[1]:+} MiB"
    )
    answered = judged(not counted.problems and marks[-1].count > marks[0].count, what)
    return (
        verdict(
            "last minute's nonces/s over the first's",
            rate(*marks[-2:]) / rate(*marks[:2]),
            STEADY_TARGET,
        )
        and answered
    )


def _repeated(options: Options, work: Callable[[int], T]) -> list[machine.Observed[T]]:
    """Each turn waits for a quiet machine and tells how quiet it stayed."""

    def turn(index: int) -> tuple[T, float]:
        machine.wait_until_quiet(QUIET_WAIT_S)
        meter = machine.UsageMeter()
        return work(index), meter.read().others

    return machine.repeated(turn, options.repeat)


def at_most(what: str, found: float, most: float, form: str) -> bool:
    return judged(found <= most, f"{what}: {form.format(found)}, at most {form.format(most)}")


def judged(passed: bool, text: str) -> bool:
    word = "[bold green]PASS[/]" if passed else "[bold red]FAIL[/]"
    console.print(f"{word} {text}\n", highlight=False)
    return passed


PARTS = {
    "latency": Part(("yield", "share"), latency),
    "resume": Part(("yield",), resume),
    "slow-readers": Part(("yield",), slow_readers),
    "constant": Part(("yield",), constant),
    "share": Part(("share",), share),
    "idle": Part(("off",), idle),
    "soak": Part(("yield", "share"), soak),
}
