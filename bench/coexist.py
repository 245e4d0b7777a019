"""What chat and proofs cost each other on one engine.

    .venv/bin/python -m bench.coexist
    .venv/bin/python -m bench.coexist --part soak --soak-minutes 10
    python -m bench.coexist --dimensions qwen3-8b --seq-len 1024 --per-second 1 --per-second 8

Both sides of each comparison (alone and during a round; with and without a chat server) take turns
on the same engine, so that changes of the machine affect both. Turns during which other programs
were busy are repeated.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

import httpx
import typer

from bench.harness import machine
from bench.harness.chat_load import (
    ChatError,
    ConstantChat,
    SlowReaders,
    Soak,
    Timed,
    Token,
    arriving,
    one_by_one,
    percentiles,
)
from bench.harness.chat_node import ANSWER_TOKENS, Node, Work, chat_node, rate
from bench.harness.engine import takes_engine
from bench.harness.report import (
    LEGEND,
    Repeat,
    at_least,
    at_most,
    console,
    judged,
    listed,
    measures,
    run,
    say,
    table,
    warn_of_noise,
)
from poc_core.settings import Settings
from workers.engines.options import EngineOptions

T = TypeVar("T")

# Most milliseconds that a round may add to the time to the first token, by percentile.
FIRST_TOKEN_ADDED_MS = {"p50": 40.0, "p95": 70.0}
# 95th percentile of the time per token during a round under `yield`, over that alone.
TOKEN_TARGET = 1.1
# Nonces/s with idle chat over those without a chat server.
IDLE_TARGET = 0.99
# Seconds after the last chat token within which proofs run at full speed again.
RESUME_TARGET_S = 0.2
# Proofs' share of the time under constant chat, for `share`, and its largest deviation.
SHARE, SHARE_MARGIN = 0.3, 0.05
# Nonces/s with slow readers over those before; a soak's last minute over its first.
STEADY_TARGET = 0.98
# A validation under constant chat: its nonces, and the most of its time over that alone; the most
# of chat's mean time per token during the validation over that alone.
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

    def turns(self, work: Callable[[int], T]) -> list[machine.Observed[T]]:
        """Calls `work` for each turn, as often as a turn is disturbed."""

        def turn(index: int) -> tuple[T, float]:
            found, usage = machine.measured(lambda: work(index), QUIET_WAIT_S)
            return found, usage.others

        return machine.repeated(turn, self.repeat)


class Turn(NamedTuple):
    """Answers alone, and as many answers during a round."""

    alone: list[Timed]
    during: list[Timed]
    nonces_per_s: float  # during the answers


def latency(node: Node, options: Options) -> bool:
    """Measures chat's times alone and during a round."""
    rows = table(
        f"Chat during a round, {node.policy}, ms, p50 / p95 of {options.requests} answers or more",
        "requests/s", "first token alone", "during", "each token alone", "during", "nonces/s",
        "others", dim=1,
    )  # fmt: skip
    n, passed = -(-options.requests // options.repeat), True
    for per_second in options.per_second or [0.0]:

        def turn(index: int, per_second: float = per_second) -> Turn:
            return _turn(node, n, per_second, index)

        turns = options.turns(turn)
        kept = machine.counted(turns)
        both = [
            [one for turn in kept for one in turn.alone],
            [one for turn in kept for one in turn.during],
        ]
        first = [percentiles(one.first_token_s for one in answers) for answers in both]
        each = [percentiles(one.token_s for one in answers) for answers in both]
        nonces = statistics.mean(turn.nonces_per_s for turn in kept)
        others = max(turn.others for turn in turns if turn.counts)
        often = f"{per_second:g} a second" if per_second else "one by one"
        rows.add_row(often, *map(str, (*first, *each)), f"{nonces:.1f}", f"{others:.2f}")
        if node.policy != "yield":
            continue
        for which, limit_ms in FIRST_TOKEN_ADDED_MS.items():
            added = getattr(first[1], which) - getattr(first[0], which)
            what = f"first token, {often}: {which} during a round, ms more than alone"
            passed &= at_most(what, added, limit_ms, ".1f")
        times = each[1].p95 / each[0].p95
        passed &= at_most(f"each token, {often}: p95 over that alone", times, TOKEN_TARGET)
    console.print(rows)
    return passed


def _turn(node: Node, n: int, per_second: float, seed: int) -> Turn:
    def answers(seed: int) -> list[Timed]:
        if per_second:
            return arriving(node.http, node.model, n, ANSWER_TOKENS, per_second, seed)
        return one_by_one(node.http, node.model, n, ANSWER_TOKENS, seed)

    alone = answers(2 * seed)
    with node.round():
        began, before = time.monotonic(), node.processed()
        during = answers(2 * seed + 1)
        return Turn(alone, during, (node.processed() - before) / (time.monotonic() - began))


def share(node: Node, options: Options) -> bool:
    """Measures the part of the time that proofs get under constant chat."""

    def turn(_: int) -> float:
        with node.round(), ConstantChat(node.http, node.model) as chat:
            time.sleep(2)
            first = node.next_busy_s()
            time.sleep(options.seconds)
            last = node.next_busy_s()
        if chat.problems:
            raise ChatError(f"{len(chat.problems)} chat requests failed: {chat.problems[0]}")
        return rate(first, last)

    turns = options.turns(turn)
    say(f"{node.policy} under constant chat, part of the time: {listed(turns, '{:.3f}'.format)}")
    found = statistics.median(machine.counted(turns))
    low, high = SHARE - SHARE_MARGIN, SHARE + SHARE_MARGIN
    return judged(low <= found <= high, f"{node.policy}: {found:.3f}, from {low:.2f} to {high:.2f}")


def idle(node: Node, options: Options) -> bool:
    """Compares nonces/s with an idle chat server to nonces/s of the same worker without one."""
    # None: no chat server. 1e6 ms: full micro-batches as without chat; the third side shows the
    # cost of the slices' limit.
    limits_ms = {
        "no chat server": None,
        "idle chat": 1e6,
        "idle chat, limited": options.work.max_step_ms,
    }

    def turn(index: int) -> dict[str, float]:
        found = {}
        for name in list(limits_ms) if index % 2 == 0 else list(limits_ms)[::-1]:
            limit_ms = limits_ms[name]
            chat = nullcontext() if limit_ms is None else _idle_chat(node, limit_ms)
            with chat, node.round():
                found[name] = node.nonces_per_s(options.seconds)
        return found

    turns = options.turns(turn)
    kept = machine.counted(turns)
    title = f"Nonces/s, {options.seconds:g} s each; limited: slices of at most"
    rows = table(
        f"{title} {options.work.max_step_ms:g} ms",
        "worker", "each turn", "median", "of no chat server",
    )  # fmt: skip
    ratios = {}
    for name in limits_ms:
        ratios[name] = statistics.median(one[name] / one["no chat server"] for one in kept)
        each = listed(turns, lambda one, name=name: f"{one[name]:.1f}")  # type: ignore[misc]
        median = statistics.median(one[name] for one in kept)
        rows.add_row(name, each, f"{median:.1f}", f"{ratios[name]:.3f}")
    console.print(rows)
    say(LEGEND)
    warn_of_noise(turns)
    return at_least("idle chat over no chat server", ratios["idle chat"], IDLE_TARGET)


@contextmanager
def _idle_chat(node: Node, max_step_ms: float) -> Iterator[None]:
    """Runs a chat server that has answered one request and gets no more."""
    port = node.stack.serve_chat(max_step_ms)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            one_by_one(http, node.model, 1, ANSWER_TOKENS, seed=0)
        yield
    finally:
        node.stack.end_chat()


def resume(node: Node, options: Options) -> bool:
    """Measures the time that proofs lose after the last chat token until they run at full speed."""

    def turn(index: int) -> float:
        with node.round():
            steady = node.nonces_per_s(5)
            answer = one_by_one(node.http, node.model, 1, 2 * ANSWER_TOKENS, index)[0]
            before = node.processed()
            time.sleep(2)
            after = node.next_nonces()
        # At full speed so many nonces take so long; the rest of the time was lost.
        return after.at - answer.ended_at - (after.count - before) / steady

    turns = options.turns(turn)
    say(f"lost after the last token, s: {listed(turns, '{:.2f}'.format)}")
    found = statistics.median(machine.counted(turns))
    return at_most("lost after the last chat token, s", found, RESUME_TARGET_S, ".2f")


def slow_readers(node: Node, options: Options) -> bool:
    """Compares nonces/s while clients read long answers byte by byte to those before."""
    with node.round():
        before = node.nonces_per_s(options.seconds)
        with SlowReaders(node.stack.base_url, node.model) as readers:
            readers.wait_until_generated(node.http)
            during = node.nonces_per_s(options.seconds)
            reading = readers.still_reading()
    say(f"{reading} clients were still reading; {before:.1f} nonces/s before, {during:.1f} during")
    is_steady = at_least("nonces/s with slow readers over before", during / before, STEADY_TARGET)
    return is_steady and reading > 0


def constant(node: Node, options: Options) -> bool:
    """Measures validations and constant chat, each alone and during the other."""
    artifacts = node.compute(VALIDATED)
    alone_s, _ = _validations(node, artifacts, options.repeat)
    with ConstantChat(node.http, node.model, n_threads=8) as chat:
        time.sleep(2)
        began = time.monotonic()
        time.sleep(options.seconds)
        alone = _tokens_since(chat, began)
        began = time.monotonic()
        took_s, n_mismatch = _validations(node, artifacts, options.repeat)
        during = _tokens_since(chat, began)
    times = {
        what: " and ".join(_times(tokens, is_first) for tokens in (alone, during))
        for what, is_first in (("first token", True), ("each token", False))
    }
    say(
        f"{VALIDATED} nonces, {n_mismatch} mismatches, {len(chat.problems)} chat requests failed;"
        f" {alone_s:.1f} s alone, {took_s:.1f} s under chat; chat alone and during, ms, p50 / p95:"
        f" {times}"
    )
    mean = [
        statistics.mean(one.after_s for one in tokens if not one.is_first)
        for tokens in (alone, during)
    ]
    what = f"a validation of {VALIDATED} nonces under constant chat, times alone"
    passed = at_most(what, took_s / alone_s, VALIDATION_TARGET, ".2f")
    what = "mean time per chat token during a validation, times alone"
    passed &= at_most(what, mean[1] / mean[0], VALIDATION_TOKEN_TARGET, ".2f")
    return passed and not n_mismatch and not chat.problems


def _validations(node: Node, artifacts: list[dict[str, Any]], n: int) -> tuple[float, int]:
    """Returns the mean seconds of `n` validations, and the mismatches of all."""
    began = time.monotonic()
    n_mismatch = sum(node.validate(artifacts) for _ in range(n))
    return (time.monotonic() - began) / n, n_mismatch


def _tokens_since(chat: ConstantChat, began: float) -> list[Token]:
    return [one for one in [*chat.tokens] if one.at - one.after_s >= began]


def _times(tokens: list[Token], is_first: bool) -> str:
    seconds = [one.after_s for one in tokens if one.is_first is is_first]
    return str(percentiles(seconds)) if seconds else "-"


def soak(node: Node, options: Options) -> bool:
    """Runs random chat during a round: no request fails, each minute is like the first."""
    if not options.soak_minutes:
        return True
    chat, used = Soak(), [machine.gpu_mib()]
    with node.round():
        marks, busy = [node.next_nonces()], [node.next_busy_s()]
        for minute in range(options.soak_minutes):
            chat.run(node.http, node.model, 60.0, SOAK_PER_SECOND, minute)
            marks.append(node.next_nonces())
            busy.append(node.next_busy_s())
            used.append(machine.gpu_mib())
            say(
                f"minute {minute + 1}: {rate(*marks[-2:]):.2f} nonces/s, engine with proofs"
                f" {rate(*busy[-2:]):.3f} of the time, {chat.answered} answers, {used[-1]} MiB of"
                " GPU memory"
            )
    for problem in chat.problems[:5]:
        say(f"  {problem}")
    passed = judged(
        not chat.problems and marks[-1].count > marks[0].count,
        f"soak of {options.soak_minutes} min, {node.policy}: {chat.answered} requests answered,"
        f" {len(chat.problems)} aborted or refused; GPU memory since the first minute:"
        f" {used[-1] - used[1]:+} MiB",
    )
    steady = rate(*marks[-2:]) / rate(*marks[:2])
    return at_least("last minute's nonces/s over the first's", steady, STEADY_TARGET) and passed


# Part -> the policies under which it is measured, and what measures it.
PARTS: dict[str, tuple[tuple[str, ...], Callable[[Node, Options], bool]]] = {
    "latency": (("yield", "share"), latency),
    "resume": (("yield",), resume),
    "slow-readers": (("yield",), slow_readers),
    "constant": (("yield",), constant),
    "share": (("share",), share),
    "idle": (("off",), idle),
    "soak": (("yield", "share"), soak),
}


@takes_engine(model="tiny-qwen3")
@measures
def main(
    *,
    part: Annotated[
        list[str] | None, typer.Option(help=f"Only this, may be repeated: {', '.join(PARTS)}.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only under this POC_CHAT_POLICY, may be repeated.")
    ] = None,
    engine_options: EngineOptions,
    seq_len: Annotated[int, typer.Option(min=1, help="Positions of a nonce.")] = 256,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Rounds of decode proofs with so many steps.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="batch_size of requests.")] = 32,
    max_step_ms: Annotated[
        float, typer.Option(min=1, help="POC_MAX_STEP_MS.")
    ] = Settings.model_fields["max_step_ms"].default,
    requests: Annotated[int, typer.Option(min=5, help="Chat requests in each situation.")] = 60,
    per_second: Annotated[
        list[float] | None,
        typer.Option(
            help="Requests a second, which come at random; may be repeated. Default: in turn."
        ),
    ] = None,
    repeat: Repeat = 5,
    seconds: Annotated[
        float, typer.Option(min=1, help="Length of a measurement of rates and shares.")
    ] = 10.0,
    soak_minutes: Annotated[
        int, typer.Option(min=0, help="Minutes of the soak, for each policy; 0: none.")
    ] = 0,
    verbose: Annotated[bool, typer.Option(help="Show the log of all processes.")] = False,
) -> bool:
    """Chat during proofs and proofs during chat. Exits with 1 when a target is missed."""
    for name in part or ():
        if name not in PARTS:
            raise typer.BadParameter(f"one of {', '.join(PARTS)}", param_hint="--part")

    def log(name: str, line: str) -> None:
        if verbose:
            say(f"{name} | {line}", markup=False)

    work = Work(engine_options, seq_len, batch_size, max_step_ms, max_tokens)
    options = Options(work, requests, per_second or [], repeat, seconds, soak_minutes)
    say(f"{machine.describe()}; model {engine_options.model}, {engine_options.dtype}")
    passed = []
    for one in policy or ["yield", f"share:{SHARE}", "off"]:
        wanted = [
            measure
            for name, (policies, measure) in PARTS.items()
            if name in (part or PARTS) and one.split(":")[0] in policies
        ]
        if wanted:
            with chat_node(work, one, log) as node:
                passed += [measure(node, options) for measure in wanted]  # also after a miss
    return all(passed)


if __name__ == "__main__":
    run(main)
