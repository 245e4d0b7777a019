"""What chat and proofs cost each other on one engine.

    .venv/bin/python -m bench.coexist
    .venv/bin/python -m bench.coexist --part soak --soak-s 600
    .venv/bin/python -m bench.coexist --model DIR --engine-arg=--load-format=dummy \
        --engine-arg=--gpu-memory-utilization=0.25

Every situation is measured beside its counterpart (alone and beside a round; with and without a chat server) on the
same engine, taking turns, so that whatever else changes on the machine meets both. Turns during which other programs
were busy are repeated.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, TypeVar

import httpx
import typer
from rich.table import Table

from bench import machine
from bench.chat_load import ChatError, ConstantChat, Soak, Timed, one_by_one, percentiles
from bench.chat_node import ANSWER_TOKENS, Node, Work, chat_node, rate
from bench.report import LEGEND, console, exit_with, verdict, warn_of_noise
from workers.engines.kinds import Dtype
from workers.engines.options import EngineOptions

T = TypeVar("T")

# Nonces/s beside idle chat over those without a chat server.
IDLE_TARGET = 0.99
# Seconds after the last chat token within which proofs run at full speed again.
RESUME_TARGET_S = 0.5
# Proofs' share of the time under constant chat, for `share`, and how far it may be off.
SHARE, SHARE_MARGIN = 0.3, 0.05


@dataclass(frozen=True)
class Options:
    work: Work
    requests: int
    repeat: int
    seconds: float
    quiet_wait_s: float
    soak_s: float
    soak_per_second: float


@dataclass(frozen=True)
class Turn:
    """Answers alone, then answers to the same prompts beside a round."""

    alone: list[Timed]
    beside: list[Timed]
    nonces_per_s: float  # beside them


def latency(options: Options) -> bool:
    """Chat's times alone and beside a round, under each policy that serves it then."""
    n = -(-options.requests // options.repeat)
    table = Table(title=f"Chat beside a round, ms, p50 / p95 of {n * options.repeat} answers")
    for heading in ("policy", "first token alone", "beside", "each token alone", "beside", "nonces/s"):
        table.add_column(heading, justify="right")
    table.add_column("others", justify="right", style="dim")
    passed = True
    for policy in ("yield", f"share:{SHARE}"):
        with chat_node(options.work, policy) as node:
            turns = machine.repeated(observed(options, lambda index: _turn(node, n, index)), options.repeat)
        kept = [turn.result for turn in turns if turn.counts]
        alone = [answer for turn in kept for answer in turn.alone]
        beside = [answer for turn in kept for answer in turn.beside]
        first = percentiles(a.first_token_s for a in alone), percentiles(b.first_token_s for b in beside)
        each = percentiles(a.token_s for a in alone), percentiles(b.token_s for b in beside)
        nonces = statistics.mean(turn.nonces_per_s for turn in kept)
        others = max(turn.others for turn in turns if turn.counts)
        table.add_row(policy, *map(str, (*first, *each)), f"{nonces:.1f}", f"{others:.2f}")
        if policy == "yield":
            most = first[0].p95 + options.work.max_step_ms
            what = f"p95 of the first token beside a round, ms (alone {first[0].p95:.1f} + POC_MAX_STEP_MS)"
            passed = at_most(what, first[1].p95, most, "{:.1f}")
    console.print(table)
    console.print("exclusive: refused while a round runs. Others: cores that other programs used at most.\n")
    return passed


def _turn(node: Node, n: int, seed: int) -> Turn:
    alone = one_by_one(node.http, node.model, n, ANSWER_TOKENS, seed)
    with node.round():
        began, before = time.monotonic(), node.processed()
        beside = one_by_one(node.http, node.model, n, ANSWER_TOKENS, seed)
        return Turn(alone, beside, (node.processed() - before) / (time.monotonic() - began))


def share(options: Options) -> bool:
    """The part of the time that proofs get under constant chat."""
    with chat_node(options.work, f"share:{SHARE}") as node:
        turns = machine.repeated(observed(options, lambda _: _share(node, options.seconds)), options.repeat)
    found = statistics.median(turn.result for turn in turns if turn.counts)
    listed = ", ".join(f"{turn.result:.3f}" if turn.counts else f"({turn.result:.3f})" for turn in turns)
    console.print(f"share:{SHARE} under constant chat, part of the time: {listed}", highlight=False)
    low, high = SHARE - SHARE_MARGIN, SHARE + SHARE_MARGIN
    return judged(low <= found <= high, f"share:{SHARE}: {found:.3f}, from {low:.2f} to {high:.2f}")


def _share(node: Node, seconds: float) -> float:
    with node.round(), ConstantChat(node.http, node.model) as chat:
        time.sleep(2)
        first = node.next_busy_s()
        time.sleep(seconds)
        last = node.next_busy_s()
    if chat.problems:
        raise ChatError(f"{len(chat.problems)} chat requests failed: {chat.problems[0]}")
    return rate(first, last)


def idle(options: Options) -> bool:
    """Nonces/s beside idle chat over nonces/s of the same worker without a chat server."""
    # On both sides the same micro-batches, whole leases; a third shows what the limit on their time costs.
    sides = {"no chat server": None, "idle chat": 1e6, "idle chat, limited": options.work.max_step_ms}
    with chat_node(options.work, "off") as node:

        def one_turn(index: int) -> dict[str, float]:
            order = list(sides) if index % 2 == 0 else list(reversed(sides))
            return {name: _nonces_per_s(node, sides[name], options.seconds) for name in order}

        turns = machine.repeated(observed(options, one_turn), options.repeat)
    kept = [turn.result for turn in turns if turn.counts]
    table = Table(title=f"Nonces/s, leases of {options.work.batch_size}, {options.seconds:g} s each")
    table.add_column("worker")
    for heading in ("each turn", "median", "of no chat server"):
        table.add_column(heading, justify="right")
    ratios = {name: statistics.median(turn[name] / turn["no chat server"] for turn in kept) for name in sides}
    for name in sides:
        listed = " ".join(f"{turn.result[name]:.1f}" if turn.counts else f"({turn.result[name]:.1f})" for turn in turns)
        median = statistics.median(turn[name] for turn in kept)
        table.add_row(name, listed, f"{median:.1f}", f"{ratios[name]:.3f}")
    console.print(table)
    console.print(f"limited: micro-batches of at most {options.work.max_step_ms:g} ms. {LEGEND}", highlight=False)
    warn_of_noise(turns)
    return verdict("idle chat over no chat server, median of turns", ratios["idle chat"], IDLE_TARGET)


def _nonces_per_s(node: Node, chat_step_ms: float | None, seconds: float) -> float:
    """`chat_step_ms`: the limit on micro-batches that chat asks for; None: there is no chat server."""
    with _idle_chat(node, chat_step_ms) if chat_step_ms is not None else nullcontext(), node.round():
        first = node.next_nonces()
        time.sleep(seconds)
        return rate(first, node.next_nonces())


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


def resume(options: Options) -> bool:
    """How much time proofs lose after the last chat token before they run at full speed."""
    with chat_node(options.work, "yield") as node:
        turns = machine.repeated(observed(options, lambda index: _lost_s(node, index)), max(5, options.repeat))
    listed = ", ".join(f"{turn.result:.2f}" if turn.counts else f"({turn.result:.2f})" for turn in turns)
    console.print(f"lost after the last token, s: {listed}", highlight=False)
    found = statistics.median(turn.result for turn in turns if turn.counts)
    return at_most("full speed after the last chat token, s lost", found, RESUME_TARGET_S, "{:.2f}")


def _lost_s(node: Node, seed: int) -> float:
    with node.round():
        first = node.next_nonces()
        time.sleep(3)
        steady = rate(first, node.next_nonces())
        answer = one_by_one(node.http, node.model, 1, 2 * ANSWER_TOKENS, seed)[0]
        before = node.processed()
        time.sleep(2)
        after = node.next_nonces()
    # At full speed so many nonces take so long; the rest of the time was lost.
    return after.at - answer.ended_at - (after.count - before) / steady


def soak(options: Options) -> bool:
    """Chat that comes at random beside a round: nobody is refused, no answer is broken off."""
    passed = True
    for policy in ("yield", f"share:{SHARE}") if options.soak_s > 0 else ():
        with chat_node(options.work, policy) as node, node.round():
            before, counted = node.processed(), Soak()
            counted.run(node.http, node.model, options.soak_s, options.soak_per_second)
            n_nonces, skips = node.processed() - before, node.gate()["skips"]
        for problem in counted.problems[:5]:
            console.print(f"  {problem}", highlight=False)
        what = (
            f"soak of {options.soak_s:g} s, {policy}: {counted.answered} requests answered, {len(counted.problems)} "
            f"aborted or refused; {n_nonces} nonces beside them, {skips:.0f} skips"
        )
        passed = judged(not counted.problems and n_nonces > 0, what) and passed
    return passed


def observed(options: Options, work: Callable[[int], T]) -> Callable[[int], tuple[T, float]]:
    """For `machine.repeated`: waits for a quiet machine and tells how quiet it stayed."""

    def turn(index: int) -> tuple[T, float]:
        machine.wait_until_quiet(options.quiet_wait_s)
        meter = machine.UsageMeter()
        return work(index), meter.read().others

    return turn


def at_most(what: str, found: float, most: float, form: str) -> bool:
    return judged(found <= most, f"{what}: {form.format(found)}, at most {form.format(most)}")


def judged(passed: bool, text: str) -> bool:
    word = "[bold green]PASS[/]" if passed else "[bold red]FAIL[/]"
    console.print(f"{word} {text}\n", highlight=False)
    return passed


PARTS: dict[str, Callable[[Options], bool]] = {
    "latency": latency,
    "share": share,
    "idle": idle,
    "resume": resume,
    "soak": soak,
}


def main(
    part: Annotated[str, typer.Option(help=f"Only this: {', '.join(PARTS)}.")] = "",
    model: Annotated[str, typer.Option(help="A shipped model, a directory or a name on the hub.")] = "tiny-qwen3",
    dtype: Annotated[Dtype, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a nonce.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Nonces of a lease.")] = 32,
    max_step_ms: Annotated[float, typer.Option(min=1, help="POC_MAX_STEP_MS.")] = 100.0,
    requests: Annotated[int, typer.Option(min=5, help="Chat requests in each situation.")] = 60,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each measurement.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Length of a measurement of rates and shares.")] = 10.0,
    soak_s: Annotated[float, typer.Option(min=0, help="Seconds of the soak, for each policy; 0: none.")] = 0.0,
    soak_per_second: Annotated[float, typer.Option(min=0.01, help="Requests a second in the soak.")] = 1.0,
    quiet_wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait before each turn until other programs are quiet.")
    ] = 30.0,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="An argument of `vllm serve`, may be repeated."),
    ] = None,
) -> None:
    """Chat beside proofs and proofs beside chat. Exits with 1 when a target is missed."""
    if part and part not in PARTS:
        raise typer.BadParameter(f"one of {', '.join(PARTS)}", param_hint="--part")
    engine = EngineOptions(model=model, dtype=dtype, vllm_args=tuple(engine_arg or ()))
    work = Work(engine, seq_len, batch_size, max_step_ms)
    options = Options(work, requests, repeat, seconds, quiet_wait, soak_s, soak_per_second)
    exit_with(lambda: measure(options, [part] if part else list(PARTS)))


def measure(options: Options, parts: list[str]) -> bool:
    engine = options.work.engine
    console.print(f"{machine.describe()}; model {engine.model}, {engine.dtype}", highlight=False)
    verdicts = [PARTS[part](options) for part in parts]  # all of them, also after a miss
    return all(verdicts)


if __name__ == "__main__":
    typer.run(main)
