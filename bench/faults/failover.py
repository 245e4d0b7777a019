"""python -m bench.faults.failover: the primary killed again and again under work (`make failover`).

A node with synthetic engines behind real Sentinels: rounds, jobs and chat go on while one primary
after the other is killed and comes back as a replica. `--forget S` cuts the replicas off S seconds
before each kill, so that what was answered within them is forgotten: then docs/redis.md's table
holds, and what the receiver has is judged by the nonces.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from redis.exceptions import RedisError

from bench.faults.inside import Inside
from bench.faults.reference import Reference, same_artifacts
from bench.faults.ways import Ways
from bench.faults.work import ROUND_NONCES, ROUND_NONCES_AGAIN, Work, undelivered
from cli.model_choice import with_chosen_model
from cli.supervise.stack import Stack
from poc_core.settings import load_settings
from poc_core.state import WorkerRegistry, connect
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import Call, FakeWorker
from tests.peers.receiver import Payload, Receiver
from tests.stacks.round_client import LOG_LINES, MODEL, RoundClient
from tests.stacks.sentinels import ALONE_TAKES_NONE, Sentinels, sentinels
from workers.engines.options import EngineOptions
from workers.load import load_engine

# Seconds from a kill to the next nonce that a client sees, at most.
MOST_S = 15.0
CHAT_MODEL = "chats-alone"
_CHAT = b'{"id": "1", "object": "text_completion", "choices": [{"text": "sea", "index": 0}]}'
_CHAT_PAUSE_S, _HEARTBEAT_S = 0.2, 2.0
_READY_S, _AGAIN_S = 300.0, 300.0
# Jobs that threads may have sent in the moment before a kill.
_JOBS_FORGOTTEN = 3
# Seconds in which nonces that were under way at a kill still come.
_UNDER_WAY_S = 1.0


@dataclass
class Report:
    kills: int
    most_s: float
    recoveries_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = []
        if self.recoveries_s:
            median, longest = statistics.median(self.recoveries_s), max(self.recoveries_s)
            survived = sum(seconds <= self.most_s for seconds in self.recoveries_s)
            lines.append(
                f"{survived} of {self.kills} survived; work went on after {median:.1f} s (median),"
                f" {longest:.1f} s (longest)"
            )
        lines += [f"{what}: {n:,}" for what, n in sorted(self.counts.items())]
        lines += [f"PROBLEM: {text} ({n} times)" for text, n in Counter(self.problems).items()]
        return "\n".join([*lines, f"{len(self.problems)} problems"])


def run(
    kills: int,
    minutes: float,
    seed: int,
    forget_s: float,
    log: Callable[[str], None],
    most_s: float = MOST_S,
) -> Report:
    """One campaign: as many kills, evenly within so many minutes. `most_s`: until work goes on."""
    report = Report(kills, most_s)
    # A primary whose replicas are cut off would take no writes, and forget none.
    own = ("min-replicas-to-write 0",) if forget_s else ALONE_TAKES_NONE
    with ExitStack() as exits:
        folder = Path(
            exits.enter_context(tempfile.TemporaryDirectory(prefix="proofline-failover-"))
        )
        redis = exits.enter_context(sentinels(folder, own=own))
        receiver = exits.enter_context(Receiver())
        options = with_chosen_model(
            EngineOptions(model=MODEL, engine="synthetic", dtype="float32", synthetic_step_ms=40.0)
        )
        reference = exits.enter_context(
            Reference(partial(load_engine, options.model_copy(update={"synthetic_step_ms": 0.0})))
        )
        lines: deque[str] = deque(maxlen=LOG_LINES)
        stack = exits.enter_context(
            Stack(
                options,
                workers=2,
                redis_url=redis.url,
                env={
                    "POC_CALLBACK_INTERVAL_SEC": "1",
                    "POC_GENERATE_RESULT_TTL_SEC": str(int(minutes * 60) + 3600),
                },
                on_line=lambda name, line: lines.append(f"{name} | {line}"),
                announce=lambda message: lines.append(f"stack | {message}"),
            )
        )
        stack.wait_ready(_READY_S)
        connection = exits.enter_context(connect(load_settings(redis_url=redis.url)))
        work = Work(
            Ways().client_of(exits, stack.port),
            receiver,
            reference.artifacts,
            same_artifacts,
            seed,
            chat=False,  # synthetic engines have none
            size=400,
            inside=Inside(connection, MODEL),
        )
        exits.enter_context(chat_worker(redis.url))
        chats = exits.enter_context(chatting(stack.base_url, report))
        pids = stack.worker_pids()
        work.start()
        try:
            # What works already is to go on.
            wait_until(lambda: work.progress and chats["answered"], "work and chat", _READY_S)
            pause_s = minutes * 60 / kills
            for number in range(kills):
                began = time.monotonic()
                chats.clear()
                told = _one_kill(redis, work, report, forget_s)
                log(f"{number + 1} of {kills}: {told}; {chats['answered']} chats meanwhile")
                if not chats["answered"]:
                    report.problems.append("no chat was answered while the primary was away")
                redis.wait_replicated()
                time.sleep(max(0.0, pause_s - (time.monotonic() - began)))
        finally:
            work.stop()
        log("the work has ended; what is under way is awaited, and the nonces are computed again")
        if stack.worker_pids() != pids:
            report.problems.append("a worker ended")
        _check_end(stack, receiver, work, forget_s, report)
        report.counts += work.counts
        report.problems += work.problems
        if report.problems:
            log("\n".join(lines))
    return report


def _one_kill(redis: Sentinels, work: Work, report: Report, forget_s: float) -> str:
    old = redis.primary
    if forget_s:
        others = [server for server in redis.servers if server is not old]
        for server in others:
            server.send(signal.SIGSTOP)
        with old.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")
        time.sleep(forget_s)
        old.stop()
        for server in others:
            server.send(signal.SIGCONT)
    else:
        old.stop()
    killed = time.monotonic()
    time.sleep(_UNDER_WAY_S)
    before = work.progress
    promoted_s = None
    while work.progress == before and time.monotonic() - killed < 4 * report.most_s:
        time.sleep(0.05)
        with suppress(AssertionError):
            if promoted_s is None and redis.primary is not old:
                promoted_s = time.monotonic() - killed
    recovery_s = time.monotonic() - killed
    report.recoveries_s.append(recovery_s)
    if recovery_s > report.most_s:
        report.problems.append(f"work went on {recovery_s:.1f} s after a kill")
    old.start()
    promoted = "work went on before the Sentinels said so"
    if promoted_s is not None:
        promoted = f"another primary after {promoted_s:.1f} s"
    return f"{promoted}, work after {recovery_s:.1f} s"


@contextmanager
def chat_worker(redis_url: str) -> Iterator[None]:
    """A worker that serves chat alone, with heartbeats as a real one's."""
    settings = load_settings(redis_url=redis_url)
    ended = threading.Event()

    def answer(call: Call) -> None:
        call.answer(_CHAT)

    with FakeWorker("chats", answer, CHAT_MODEL) as worker, connect(settings) as redis:
        registry = WorkerRegistry(redis, settings)

        def beat() -> None:
            while not ended.is_set():
                with suppress(RedisError):
                    registry.heartbeat(worker.record)
                ended.wait(_HEARTBEAT_S)

        thread = threading.Thread(target=beat)
        registry.heartbeat(worker.record)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def chatting(base_url: str, report: Report) -> Iterator[Counter[str]]:
    """Chats five times a second; yields what they were answered since it was cleared."""
    ended, since = threading.Event(), Counter[str]()

    def chat() -> None:
        body = {"model": CHAT_MODEL, "prompt": "the sea", "max_tokens": 1}
        with httpx.Client(base_url=base_url, timeout=30, trust_env=False) as http:
            while not ended.wait(_CHAT_PAUSE_S):
                began = time.monotonic()
                try:
                    answer = http.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    report.problems.append(f"a chat without an answer: {error!r}")
                    continue
                took_ms = int((time.monotonic() - began) * 1000)
                report.counts["longest chat, ms"] = max(report.counts["longest chat, ms"], took_ms)
                report.counts[f"chats {answer.status_code}"] += 1
                if answer.status_code == 200:
                    since["answered"] += 1
                else:
                    report.problems.append(f"a chat was answered {answer.text[:200]}")

    thread = threading.Thread(target=chat)
    thread.start()
    try:
        yield since
    finally:
        ended.set()
        thread.join()


def _check_end(
    stack: Stack, receiver: Receiver, work: Work, forget_s: float, report: Report
) -> None:
    with httpx.Client(base_url=stack.base_url, timeout=30, trust_env=False) as http:
        report.problems += undelivered(RoundClient(http))
    if forget_s:
        _keep_last(receiver, report)
        _let_go(work, _JOBS_FORGOTTEN * report.kills)
    work.check_rounds(_AGAIN_S)
    work.check_callbacks()
    if work.counts[ROUND_NONCES_AGAIN] < work.counts[ROUND_NONCES]:
        report.counts["nonces of rounds that time was too short for"] = (
            work.counts[ROUND_NONCES] - work.counts[ROUND_NONCES_AGAIN]
        )


def _keep_last(receiver: Receiver, report: Report) -> None:
    """Leaves of each payload number what came last, as a receiver does that goes by the number."""
    last: dict[str, Payload] = {}
    for payload in receiver.round_payloads():
        known = last.pop(payload.payload_id, None)
        if known is not None and known.body != payload.body:
            report.counts["payloads that came again with other contents"] += 1
        last[payload.payload_id] = payload
    others = [payload for payload in receiver.payloads if "request_id" in payload.body]
    receiver.payloads = others + sorted(last.values(), key=lambda payload: payload.number)


def _let_go(work: Work, most: int) -> None:
    """Leaves out jobs accepted in a moment that was forgotten: whoever sent one asks again.

    More than `most` are a problem all the same.
    """
    lost = [problem for problem in work.problems if problem.endswith("{'status': 'lost'}")]
    for problem in lost[:most]:
        work.problems.remove(problem)
        work.waits_for_callback.pop(problem.split()[1], None)  # job ID of ...


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults.failover", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--forget", type=float, default=0.0, help="seconds that replicas are behind at a kill"
    )
    given = parser.parse_args()
    seed = int(time.time()) if given.seed is None else given.seed
    log = lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: E731
    log(f"seed {seed}")
    report = run(given.kills, given.minutes, seed, given.forget, log)
    print(report.text())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
