"""A running stack as a round's tests see it: start, watch, stop, wait."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import redis

from cli.supervise.processes import Child, environment_of_proofline
from cli.supervise.stack import Stack
from poc_core.records import RoundRecord
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.rounds import RoundStore
from tests.peers.receiver import Receiver, gaps_and_repeats
from workers.engines.options import EngineOptions

MODEL = "tiny-qwen3"

# A shorter wait for the dead: heartbeats, reaping and deliveries' locks follow POC_WORKER_TTL_S.
FAST = {
    "POC_CALLBACK_INTERVAL_SEC": "1",
    "POC_WORKER_TTL_S": "4",
}
LOG_LINES = 4000


class RoundClient:
    """Talks to a node as an aggregator does."""

    def __init__(self, http: httpx.Client, log: Sequence[str] = (), model: str = MODEL) -> None:
        self.http = http
        self.model = model
        self._log = log

    @property
    def base_url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    @property
    def redis_url(self) -> str:
        """The url of the node's Redis, for tests that look into it."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """The last lines of all processes' logs."""
        return list(self._log)

    def start(self, receiver: Receiver | None, **changes: Any) -> None:
        answer = self.http.post("/api/v1/pow/init/generate", json=round_body(receiver, **changes))
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"status": "OK", "pow_status": {"status": "GENERATING"}}

    def stop(self) -> dict[str, Any]:
        answer = self.http.post("/api/v1/pow/stop")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def status(self) -> dict[str, Any]:
        answer = self.http.get("/api/v1/pow/status")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["stats"]
        return found

    def processed(self) -> int:
        return int(self.stats()["total_processed"])

    def wait_progress(self, n: int = 1, timeout_s: float = 120.0) -> None:
        """Waits until `n` more nonces are computed; an API that is away has not answered yet."""
        before = self.processed()
        self.wait(lambda: self.processed() >= before + n, timeout_s, f"{n} more nonces")

    def wait_delivered(self, timeout_s: float = 180.0) -> None:
        """Waits until nothing of the round waits for its receiver. The round must be over."""
        self.wait_settled()
        self.wait(lambda: self.stats()["artifacts_waiting"] == 0, timeout_s, "everything delivered")

    def wait_settled(self) -> None:
        """After a stop: waits until what the workers had in hand is counted."""
        seen, since = -1, time.monotonic()
        while time.monotonic() - since < 1.0:
            now = self.processed()
            if now != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.1)

    def wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Seconds until the condition held. The API and its Redis may be away meanwhile."""
        began = time.monotonic()
        problem: object = "it does not hold"
        while time.monotonic() - began < timeout_s:
            try:
                if condition():
                    return time.monotonic() - began
                problem = "it does not hold"
            except (httpx.HTTPError, AssertionError) as error:
                problem = error
            time.sleep(0.05)
        tail = "\n".join(self.lines()[-40:])
        raise AssertionError(f"Not within {timeout_s:g} s: {what} ({problem}).\n{tail}")


class StackClient(RoundClient):
    """A client that can hurt the stack, too."""

    def __init__(self, stack: Stack, http: httpx.Client, log: Sequence[str]) -> None:
        super().__init__(http, log, stack.model_name)
        self.stack = stack

    @property
    def redis_url(self) -> str:
        return str(self.stack.redis_url)

    def children(self) -> list[Child]:
        return self.stack._children()

    def kill(self, name: str) -> int:
        """SIGKILL for "api", "redis", "courier" or "cpu0", which restarts. The old pid."""
        child = self._child(name)
        self.wait(lambda: child.pid is not None, 180, f"{name}, which another test may have ended")
        pid = child.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.wait(lambda: child.pid != pid, 180, f"the end of {name}")
        return pid

    def _child(self, name: str) -> Child:
        """A process by its name, or a worker by its slot."""
        children = self.children()
        return next(child for child in children if child.spec.name.rpartition("/")[2] == name)

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = 180.0) -> None:
        child = self._child(name)
        self.wait(lambda: child.pid not in (None, old_pid), timeout_s, f"another {name}")


def leave_nothing(client: RoundClient) -> None:
    """Ends the round, and forgets what no receiver has taken: so a failure is no other test's."""
    client.wait(lambda: bool(client.stop()), 180, "the end of the round")
    with redis.Redis.from_url(client.redis_url) as connection:
        client.wait(
            lambda: not any(connection.scan_iter("poc:round:*:leases")),
            180,
            "the end of all leases",
        )
        connection.delete(keys.OUTBOX_DUE, *connection.scan_iter("poc:outbox:*"))


def forget_callbacks(client: RoundClient) -> None:
    """Clears the outbox, as if every receiver had taken what is its own."""
    with redis.Redis.from_url(client.redis_url) as connection:
        connection.delete(keys.OUTBOX_DUE, keys.OUTBOX_JOBS)


@contextmanager
def another_worker(stack: Stack) -> Iterator[subprocess.Popen[bytes]]:
    """One more worker, as another host might start it; told to stop at the end."""
    env = environment_of_proofline({**stack.env, "POC_REDIS_URL": stack.redis_url or ""})
    with subprocess.Popen(stack.worker_command(), env=env, stdout=-3, stderr=-3) as worker:
        try:
            yield worker
        finally:
            worker.terminate()
            try:
                worker.wait(180)
            finally:
                worker.kill()  # where that was not enough


def round_body(receiver: Receiver | None, **changes: Any) -> dict[str, Any]:
    """A body for /init/generate, with changes; those to `params` are merged."""
    node = {
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "node_id": 0,
        "node_count": 1,
    }
    params = {"model": MODEL, "seq_len": 64, "k_dim": 12} | changes.pop("params", {})
    url = {"url": receiver.url} if receiver is not None else {}
    return node | {"params": params} | url | changes


def given_back(client: RoundClient) -> set[int]:
    """The nonces of the latest round that workers had in hand at its stop: nobody's now.

    No worker holds a lease any more.
    """
    with redis.Redis.from_url(client.redis_url) as connection:
        record = RoundStore(connection, Settings()).current()
        assert record is not None
        key = keys.round(record.round_id)
        client.wait(lambda: not connection.exists(f"{key}:leases"), 180, "the end of all leases")
        return uncomputed(connection, record)


def uncomputed(connection: redis.Redis, record: RoundRecord) -> set[int]:
    """The nonces of an ended round that were given back, or are leased still."""
    key = keys.round(record.round_id)
    members = [*connection.zrange(f"{key}:free", 0, -1), *connection.hkeys(f"{key}:leases")]
    leases = [tuple(map(int, member.split(b":")[:2])) for member in members]
    nonces = record.config.nonces
    return {nonce for first, places in leases for nonce in nonces[first : first + places]}


def assert_complete(client: RoundClient, receiver: Receiver, expected: range | None = None) -> None:
    """The receiver has each computed nonce once, with no gap but what was in hand at the stop."""
    in_hand = given_back(client)
    client.wait(lambda: client.stats()["artifacts_waiting"] == 0, 180, "everything delivered")
    stats, nonces = client.stats(), receiver.nonces()
    missing, wrong = gaps_and_repeats(nonces, expected if expected is not None else range(2**62))
    assert (sorted(set(missing) - in_hand)[:10], wrong[:10]) == ([], [])
    assert in_hand.isdisjoint(nonces)
    assert len(nonces) == stats["total_processed"] == stats["artifacts_delivered"]
    assert sum(worker["total_processed"] for worker in stats["workers"].values()) == len(nonces)


@contextmanager
def running_stack(
    env: dict[str, str] | None = None, ready_s: float = 120.0, **options: Any
) -> Iterator[StackClient]:
    """A stack of its own, synthetic unless told otherwise, that is ready."""
    log: deque[str] = deque(maxlen=LOG_LINES)
    engine = {name: options.pop(name) for name in EngineOptions.model_fields if name in options}
    stack = Stack(
        EngineOptions(**{"model": MODEL, "engine": "synthetic"} | engine),
        env={**FAST, **(env or {})},
        on_line=lambda name, line: log.append(f"{name} | {line}"),
        announce=lambda message: log.append(f"stack | {message}"),
        **{"workers": 2} | options,
    )
    with stack, httpx.Client(base_url=stack.base_url, timeout=300, trust_env=False) as http:
        stack.wait_ready(ready_s)
        yield StackClient(stack, http, log)
