"""A campaign: a stack under work, faults one after the other, and the check at the end."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from redis import Redis

from bench.faults.faults import Fault, Victims
from bench.faults.inside import Inside
from bench.faults.reference import Reference, same_artifacts
from bench.faults.stack import FaultyStack, MovedClock, small_disk
from bench.faults.usage import Usage, uses_of
from bench.faults.ways import Client, Ways, by_tls
from bench.faults.work import ROUND_NONCES, ROUND_NONCES_AGAIN, Work, undelivered
from cli.model_choice import with_chosen_model
from poc_core.state import keys
from tests.peers.receiver import Receiver
from tests.stacks.round_client import FAST, LOG_LINES, MODEL, RoundClient
from workers.engines.options import EngineKind, EngineOptions
from workers.load import load_engine

# Most seconds from a fault's end to the next nonce that a client sees.
MOST_RECOVERY_S = 30.0
# Seconds after which a restarted process has reached its usual memory, including a model.
_SETTLE_S = 120.0
READY_S = 300.0
# Seconds of computing the rounds' nonces again: a quiet core computes about 500 a second.
AGAIN_S = 300.0


@dataclass
class Report:
    """The results of a campaign."""

    seed: int
    most_s: float = MOST_RECOVERY_S
    seconds: float = 0.0
    check_s: float = 0.0  # of the check at the end
    faults: Counter[str] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    usage: list[str] = field(default_factory=list)
    histories: list[str] = field(default_factory=list)  # of jobs that did not end in time
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [f"seed {self.seed}, {self.seconds:.0f} s, {sum(self.faults.values())} faults"]
        lines += [f"  {n:>5} {what}" for what, n in sorted(self.faults.items())]
        if self.recoveries_s:
            median, longest = statistics.median(self.recoveries_s), max(self.recoveries_s)
            survived = sum(seconds <= self.most_s for seconds in self.recoveries_s)
            lines.append(
                f"{survived} of {len(self.recoveries_s)} survived; work went on after"
                f" {median:.1f} s (median), {longest:.1f} s (longest)"
            )
        lines += [f"{what}: {n:,}" for what, n in sorted(self.counts.items())]
        lines += self.usage
        lines.append(f"the check at the end took {self.check_s:.0f} s")
        if self.counts[ROUND_NONCES_AGAIN] < self.counts[ROUND_NONCES]:
            lines.append(
                "not all nonces of the rounds were computed again, but as many as time allowed,"
                " drawn by the seed"
            )
        lines += self.histories
        lines += [f"PROBLEM: {text} ({n} times)" for text, n in Counter(self.problems).items()]
        return "\n".join([*lines, f"{len(self.problems)} problems"])

    def wait_for_work(
        self,
        work: Work,
        what: str,
        since: float | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> str:
        """Waits until a client sees a new nonce after a fault; notes and returns the seconds.

        `since`: the time of the fault, by default now. `poll` is called repeatedly meanwhile.
        """
        since, before = since or time.monotonic(), work.progress
        while work.progress == before and time.monotonic() - since < 4 * self.most_s:
            time.sleep(0.05)
            poll()
        recovery_s = time.monotonic() - since
        self.recoveries_s.append(recovery_s)
        if recovery_s > self.most_s:
            self.problems.append(f"work went on {recovery_s:.1f} s after: {what}")
        return f"work went on after {recovery_s:.1f} s"


def options_of(engine: EngineKind) -> EngineOptions:
    """Returns the options of a campaign's workers."""
    args = ("--enforce-eager",) if engine == "vllm" else ()
    return with_chosen_model(
        EngineOptions(
            model=MODEL, engine=engine, dtype="float32", synthetic_step_ms=40.0, vllm_args=args
        )
    )


def reference_of(options: EngineOptions) -> Reference:
    """Returns the engines that compute nonces again, synthetic ones without their pauses."""
    is_vllm = options.engine == "vllm"
    second = {"synthetic_step_ms": 0.0} | ({"engine": "transformers"} if is_vllm else {})
    return Reference(partial(load_engine, options.model_copy(update=second)))


def logging_to(lines: deque[str]) -> dict[str, Any]:
    """Returns the arguments of a stack that adds its logs to `lines`."""
    return {
        "on_line": lambda name, line: lines.append(f"{name} | {line}"),
        "announce": lambda message: lines.append(f"stack | {message}"),
    }


def kept_for(minutes: float) -> dict[str, str]:
    """Returns the setting that keeps jobs' results until the campaign has checked them."""
    return {"POC_GENERATE_RESULT_TTL_SEC": str(int(minutes * 60) + 3600)}


def run(
    minutes: float,
    seed: int,
    engine: EngineKind,
    faults: Sequence[Fault],
    pause_s: float,
    log: Callable[[str], None],
    tls: bool = False,
) -> Report:
    """Runs one campaign on two workers of `engine`.

    `pause_s`: mean pause after a recovery. `tls`: all connections use TLS where a node supports it.
    """
    report, lines = Report(seed), deque[str](maxlen=LOG_LINES)
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="proofline-faults-")))
        clock = MovedClock(folder / "clock")
        ways = exits.enter_context(by_tls(folder)) if tls else Ways()
        has_disk = exits.enter_context(small_disk(folder / "disk"))
        options = options_of(engine)
        stack = FaultyStack(
            options,
            workers=2,
            data_dir=None if tls else folder / "disk" / "redis",
            redis_url=ways.redis_url,
            env={**FAST, **clock.env, **ways.env, **kept_for(minutes)},
            max_fast_crashes=1000,
            **logging_to(lines),
        )
        receiver = exits.enter_context(Receiver(tls=ways.receiver))
        reference = exits.enter_context(reference_of(options))
        exits.enter_context(stack)
        stack.wait_ready(READY_S)
        client = ways.client_of(exits, stack.port)
        work = Work(
            client,
            receiver,
            reference.artifacts,
            same_artifacts,
            seed,
            chat=engine == "vllm",
            size=400 if engine == "synthetic" else 100,
            inside=Inside(exits.enter_context(Redis.from_url(stack.own_url)), MODEL),
        )
        began = time.monotonic()
        # Faults leave connections and buffers in pools.
        limits = (_SETTLE_S, 256, 200) if faults else (minutes * 6, 64, 20)
        usage = Usage(lambda: uses_of(stack.children()), *limits)
        disk = folder / "disk" if has_disk else None
        victims = Victims(stack, receiver, clock, disk, random.Random(seed))
        with work:
            until = began + minutes * 60
            while time.monotonic() < until:
                if faults:
                    _one_fault(faults, victims, work, report, pause_s, log)
                else:
                    time.sleep(min(5.0, max(0.0, until - time.monotonic())))
                usage.look()
        ended = time.monotonic()
        report.seconds = ended - began
        log("the work has ended; payloads in progress are awaited, and nonces computed again")
        _check_end(stack, client, work, report, max(AGAIN_S, report.seconds))
        report.check_s = time.monotonic() - ended
        report.usage, report.histories = usage.text(), work.histories
        report.counts = work.counts
        report.problems = [*work.problems, *report.problems, *usage.growth()]
        if report.problems:
            log("\n".join(lines))
    return report


def _one_fault(
    faults: Sequence[Fault],
    victims: Victims,
    work: Work,
    report: Report,
    pause_s: float,
    log: Callable[[str], None],
) -> None:
    fault = victims.rng.choice(faults)
    name = fault.__name__.replace("_", " ")
    work.happened(f"begins: {name}")
    done = fault(victims)
    work.happened(f"ends: {done}")
    report.faults[name] += 1
    log(f"{done}; {report.wait_for_work(work, done)}")
    time.sleep(victims.rng.expovariate(1 / pause_s) if pause_s else 0)


def _check_end(
    stack: FaultyStack, client_of: Client, work: Work, report: Report, again_s: float
) -> None:
    with client_of() as http, Redis.from_url(stack.own_url) as connection:
        report.problems += undelivered(RoundClient(http))
        work.check_rounds(again_s)
        work.check_callbacks()
        ours = (key.decode() for key in connection.scan_iter("poc:*"))
        eternal = {key for key in ours if connection.ttl(key) == -1} - {keys.DEPLOYMENT}
        if eternal:
            report.problems.append(f"{len(eternal)} keys have no TTL: {sorted(eternal)[:10]}")
        messages: Any = connection.llen(f"poc.model.{MODEL}")
        if messages > 100:
            report.problems.append(f"{messages} messages are left")
