"""A campaign: a stack under work, faults one after the other, and what must hold after it."""

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
from workers.engines.kinds import EngineKind
from workers.engines.options import EngineOptions
from workers.load import load_engine

# Seconds from a fault's end to the next nonce that a client sees.
MOST_RECOVERY_S = 30.0
# Seconds after which a restarted process has what it needs, a model too.
_SETTLE_S = 120.0
_READY_S = 300.0
# Seconds of computing the rounds' nonces again: a quiet core makes some 500 a second.
_AGAIN_S = 300.0


@dataclass
class Report:
    seed: int
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
            lines.append(f"recovery: median {median:.1f} s, longest {longest:.1f} s")
        lines += [f"{what}: {n:,}" for what, n in sorted(self.counts.items())]
        lines += self.usage
        lines.append(f"the check at the end took {self.check_s:.0f} s")
        if self.counts[ROUND_NONCES_AGAIN] < self.counts[ROUND_NONCES]:
            lines.append(
                "not all nonces of the rounds were computed again, but as many as time allowed,"
                " drawn by the seed"
            )
        lines += self.histories
        lines += [
            f"PROBLEM: {problem} ({n} times)" for problem, n in Counter(self.problems).items()
        ]
        return "\n".join([*lines, f"{len(self.problems)} problems"])


def run(
    minutes: float,
    seed: int,
    engine: EngineKind,
    faults: Sequence[Fault],
    pause_s: float,
    log: Callable[[str], None],
    tls: bool = False,
) -> Report:
    """One campaign on two workers of `engine`; `pause_s`: mean pause after a recovery. `tls`:
    wherever a node can speak it.
    """
    report = Report(seed)
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="proofline-faults-")))
        clock = MovedClock(folder / "clock")
        ways = exits.enter_context(by_tls(folder)) if tls else Ways()
        has_disk = exits.enter_context(small_disk(folder / "disk"))
        lines: deque[str] = deque(maxlen=LOG_LINES)
        args = ("--enforce-eager",) if engine == "vllm" else ()
        options = with_chosen_model(
            EngineOptions(
                model=MODEL, engine=engine, dtype="float32", synthetic_step_ms=40.0, vllm_args=args
            )
        )
        stack = FaultyStack(
            options,
            workers=2,
            data_dir=None if tls else folder / "disk" / "redis",
            redis_url=ways.redis_url,
            env={
                **FAST,
                **clock.env,
                **ways.env,
                "POC_GENERATE_RESULT_TTL_SEC": str(int(minutes * 60) + 3600),
            },
            max_fast_crashes=1000,
            on_line=lambda name, line: lines.append(f"{name} | {line}"),
            announce=lambda message: lines.append(f"stack | {message}"),
        )
        receiver = exits.enter_context(Receiver(tls=ways.receiver))
        # At the end all rounds' nonces are computed again, and not at a synthetic engine's pace.
        second: dict[str, object] = (
            {"synthetic_step_ms": 0.0} if engine == "synthetic" else {"engine": "transformers"}
        )
        reference = exits.enter_context(
            Reference(partial(load_engine, options.model_copy(update=second)))
        )
        exits.enter_context(stack)
        stack.wait_ready(_READY_S)
        size = 400 if engine == "synthetic" else 100
        client = ways.client_of(exits, stack.port)
        work = Work(
            client,
            receiver,
            reference.artifacts,
            same_artifacts,
            seed,
            chat=engine == "vllm",
            size=size,
            inside=Inside(exits.enter_context(Redis.from_url(stack.own_url)), MODEL),
        )
        began = time.monotonic()
        # What hung and was cut leaves connections and buffers in pools.
        limits = (_SETTLE_S, 256, 200) if faults else (minutes * 6, 64, 20)
        usage = Usage(lambda: uses_of(stack.children()), *limits)
        work.start()
        try:
            until = began + minutes * 60
            victims = Victims(
                stack, receiver, clock, folder / "disk" if has_disk else None, random.Random(seed)
            )
            while time.monotonic() < until:
                if faults:
                    _one_fault(faults, victims, work, report, pause_s, log)
                else:
                    time.sleep(min(5.0, max(0.0, until - time.monotonic())))
                usage.look()
        finally:
            work.stop()
        report.seconds = time.monotonic() - began
        ended = time.monotonic()
        log(
            "the work has ended; what is under way is awaited, and the rounds' nonces are computed"
            " again"
        )
        _check_end(stack, client, work, report, max(_AGAIN_S, report.seconds))
        report.check_s = time.monotonic() - ended
        report.usage = usage.text()
        report.problems += usage.growth()
        report.histories = work.histories
        report.counts, report.problems = work.counts, work.problems + report.problems
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
    work.happened(f"begins: {fault.__name__.replace('_', ' ')}")
    done = fault(victims)
    work.happened(f"ends: {done}")
    ended, before = time.monotonic(), work.progress
    while work.progress == before and time.monotonic() - ended < 4 * MOST_RECOVERY_S:
        time.sleep(0.05)
    recovery_s = time.monotonic() - ended
    report.faults[fault.__name__.replace("_", " ")] += 1
    report.recoveries_s.append(recovery_s)
    log(f"{done}; work went on after {recovery_s:.1f} s")
    if recovery_s > MOST_RECOVERY_S:
        report.problems.append(f"work went on {recovery_s:.1f} s after: {done}")
    time.sleep(victims.rng.expovariate(1 / pause_s) if pause_s else 0)


def _check_end(
    stack: FaultyStack, client_of: Client, work: Work, report: Report, again_s: float
) -> None:
    with (
        client_of() as http,
        Redis.from_url(stack.own_url) as connection,
    ):
        report.problems += undelivered(RoundClient(http))
        work.check_rounds(again_s)
        work.check_callbacks()
        eternal = {
            key.decode() for key in connection.scan_iter("poc:*") if connection.ttl(key) == -1
        } - {keys.DEPLOYMENT}
        if eternal:
            report.problems.append(f"{len(eternal)} keys have no TTL: {sorted(eternal)[:10]}")
        messages = {queue: connection.llen(queue) for queue in (f"poc.model.{MODEL}",)}
        if sum(messages.values()) > 100:
            report.problems.append(f"messages are left: {messages}")
