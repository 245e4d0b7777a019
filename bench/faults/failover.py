"""python -m bench.faults.failover: kills of Redis' primary under work (`make failover`).

A node with synthetic engines uses real Sentinels. Rounds, jobs and chat go on while one primary
after the other is killed and restarted as a replica. `--forget S` stops replication S seconds
before each kill, so that everything accepted in these seconds is lost; docs/redis.md has the table
of what may be lost.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
from redis.exceptions import RedisError

from bench.faults.campaign import (
    AGAIN_S,
    READY_S,
    Report,
    kept_for,
    logging_to,
    options_of,
    reference_of,
)
from bench.faults.inside import Inside
from bench.faults.reference import same_artifacts
from bench.faults.ways import Ways
from bench.faults.work import Work, printed_at, undelivered
from bench.harness.chat_load import Threads
from cli.supervise.stack import Stack
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.registry import WorkerRegistry
from tests.harness.waiting import wait_until
from tests.peers.fake_worker import FakeWorker
from tests.peers.receiver import Payload, Receiver
from tests.stacks.round_client import LOG_LINES, MODEL, RoundClient
from tests.stacks.sentinels import ALONE_TAKES_NONE, Sentinels, sentinels

# Most seconds from a kill to the next nonce that a client sees.
MOST_S = 15.0
CHAT_MODEL = "chats-alone"
_CHAT = b'{"id": "1", "object": "text_completion", "choices": [{"text": "sea", "index": 0}]}'
_CHAT_PAUSE_S, _HEARTBEAT_S = 0.2, 2.0
# Jobs that threads may have sent in the moment before a kill.
_JOBS_FORGOTTEN = 3
# Seconds in which nonces that were in progress at a kill still arrive.
_UNDER_WAY_S = 1.0


def run(
    kills: int,
    minutes: float,
    seed: int,
    forget_s: float,
    log: Callable[[str], None],
    most_s: float = MOST_S,
) -> Report:
    """Runs one campaign with `kills` kills, evenly within `minutes`."""
    report, lines = Report(seed, most_s), deque[str](maxlen=LOG_LINES)
    # With the usual setting a primary without replicas would accept no writes, and lose none.
    own = ("min-replicas-to-write 0",) if forget_s else ALONE_TAKES_NONE
    with ExitStack() as exits:
        folder = tempfile.TemporaryDirectory(prefix="proofline-failover-")
        redis = exits.enter_context(sentinels(Path(exits.enter_context(folder)), own=own))
        receiver = exits.enter_context(Receiver())
        options = options_of("synthetic")
        reference = exits.enter_context(reference_of(options))
        env = {"POC_CALLBACK_INTERVAL_SEC": "1", **kept_for(minutes)}
        stack = exits.enter_context(
            Stack(options, workers=2, redis_url=redis.url, env=env, **logging_to(lines))
        )
        stack.wait_ready(READY_S)
        connection = exits.enter_context(connect(load_settings(redis_url=redis.url)))
        work = Work(
            Ways().client_of(exits, stack.port),
            receiver,
            reference.artifacts,
            same_artifacts,
            seed,
            chat=False,  # synthetic engines serve none
            size=400,
            inside=Inside(connection, MODEL),
        )
        exits.enter_context(chat_worker(redis.url))
        chats = exits.enter_context(Chats(stack.base_url, report))
        pids, began = stack.worker_pids(), time.monotonic()
        with work:
            wait_until(lambda: work.progress and chats.answered, "work and chat", READY_S)
            for number in range(kills):
                at = time.monotonic()
                chats.answered = 0
                done = _one_kill(redis, work, report, forget_s)
                log(f"{number + 1} of {kills}: {done}; {chats.answered} chats meanwhile")
                if not chats.answered:
                    report.problems.append("no chat was answered while the primary was away")
                redis.wait_replicated()
                time.sleep(max(0.0, minutes * 60 / kills - (time.monotonic() - at)))
        report.seconds = time.monotonic() - began
        log("the work has ended; payloads in progress are awaited, and nonces computed again")
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
    others = [server for server in redis.servers if server is not old] if forget_s else []
    for server in others:
        server.send(signal.SIGSTOP)
    if others:
        with old.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")
        time.sleep(forget_s)
    old.stop()
    for server in others:
        server.send(signal.SIGCONT)
    report.faults["kill of the primary"] += 1
    killed, promoted = time.monotonic(), "no other primary yet"
    time.sleep(_UNDER_WAY_S)

    def look() -> None:
        nonlocal promoted
        with suppress(AssertionError):
            if promoted.startswith("no ") and redis.primary is not old:
                promoted = f"another primary after {time.monotonic() - killed:.1f} s"

    went_on = report.wait_for_work(work, "a kill", killed, look)
    old.start()
    return f"{promoted}, {went_on}"


class Heartbeats(Threads):
    """The heartbeats of a worker that serves only chat."""

    def __init__(self, worker: FakeWorker, registry: WorkerRegistry) -> None:
        super().__init__(1)
        self._worker, self._registry = worker, registry
        registry.heartbeat(worker.record)

    def run(self, number: int) -> None:
        while not self._stop.wait(_HEARTBEAT_S):
            with suppress(RedisError):
                self._registry.heartbeat(self._worker.record)


@contextmanager
def chat_worker(redis_url: str) -> Iterator[None]:
    """Runs a worker that serves only chat."""
    settings = load_settings(redis_url=redis_url)
    worker = FakeWorker("chats", lambda call: call.answer(_CHAT), CHAT_MODEL)
    with worker, connect(settings) as redis, Heartbeats(worker, WorkerRegistry(redis, settings)):
        yield


class Chats(Threads):
    """A client that chats five times a second; other answers than 200 are problems."""

    def __init__(self, base_url: str, report: Report) -> None:
        super().__init__(1)
        self.answered = 0  # may be reset
        self._base_url, self._report = base_url, report

    def run(self, number: int) -> None:
        counts, problems = self._report.counts, self._report.problems
        body = {"model": CHAT_MODEL, "prompt": "the sea", "max_tokens": 1}
        with httpx.Client(base_url=self._base_url, timeout=30, trust_env=False) as http:
            while not self._stop.wait(_CHAT_PAUSE_S):
                began = time.monotonic()
                try:
                    answer = http.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    problems.append(f"a chat without an answer: {error!r}")
                    continue
                took_ms = int((time.monotonic() - began) * 1000)
                counts["longest chat, ms"] = max(counts["longest chat, ms"], took_ms)
                counts[f"chats {answer.status_code}"] += 1
                if answer.status_code == 200:
                    self.answered += 1
                else:
                    problems.append(f"a chat was answered {answer.text[:200]}")


def _check_end(
    stack: Stack, receiver: Receiver, work: Work, forget_s: float, report: Report
) -> None:
    with httpx.Client(base_url=stack.base_url, timeout=30, trust_env=False) as http:
        report.problems += undelivered(RoundClient(http))
    if forget_s:
        _keep_last(receiver, report)
        _let_go(work, _JOBS_FORGOTTEN * sum(report.faults.values()))
    work.check_rounds(AGAIN_S)
    work.check_callbacks()


def _keep_last(receiver: Receiver, report: Report) -> None:
    """Keeps only the last payload of each number, as a receiver that goes by the number does."""
    last: dict[str, Payload] = {}
    for payload in receiver.round_payloads():
        known = last.pop(payload.payload_id, None)
        if known is not None and known.body != payload.body:
            report.counts["payloads that came again with other contents"] += 1
        last[payload.payload_id] = payload
    others = [payload for payload in receiver.payloads if "request_id" in payload.body]
    receiver.payloads = others + sorted(last.values(), key=lambda payload: payload.number)


def _let_go(work: Work, most: int) -> None:
    """Removes at most `most` problems of lost jobs, whose clients would send the jobs again."""
    lost = [problem for problem in work.problems if problem.endswith("{'status': 'lost'}")]
    for problem in lost[:most]:
        work.problems.remove(problem)
        work.waits_for_callback.pop(problem.split()[1], None)  # job ID of ...


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults.failover", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--forget", type=float, default=0.0, help="seconds that replicas are behind at a kill"
    )
    given = parser.parse_args()
    report = run(given.kills, given.minutes, given.seed, given.forget, printed_at)
    print(report.text())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
