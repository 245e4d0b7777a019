"""A node as its processes tell it to Redis, without any of them: for pages that show it.

What it tells goes through the product's own stores, so a page cannot know the difference.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import JsonValue
from redis import Redis

from poc_core.periodic import Periodic
from poc_core.records import Refusal, RoundState, WorkerRecord
from poc_core.serving.deployments import ChildLog, Deployment, HostLogs, HostReport, HostState
from poc_core.serving.places import WorkerPlace
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import Outbox
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import MODEL, complete_lease, lease_nonces, round_config, worker_record

BEAT_S = 0.3
HOST = "host1"
# Of each worker, with each beat while a round runs.
NONCES = 8


@dataclass
class ToldNode:
    """One host with workers that have a GPU each; `beating` keeps it alive."""

    redis: Redis
    settings: Settings
    n: int = 8
    ended: set[int] = field(default_factory=set)  # workers that are killed, by number
    chats: int = 0  # under way on each worker

    def __post_init__(self) -> None:
        self.jobs = JobStore(self.redis, self.settings)
        self.rounds = RoundStore(self.redis, self.settings)
        self.outbox = Outbox(self.redis, self.settings)
        self.registry = WorkerRegistry(self.redis, self.settings)
        self.deployments = DeploymentStore(self.redis, self.settings)
        self.began = time.time()
        self._beats = 0
        self._lock = threading.RLock()  # no beat under way tells of one that is killed meanwhile
        self._ended_at: dict[int, float] = {}

    def name(self, number: int) -> str:
        return f"{HOST}/gpu{number}"

    def worker(self, number: int) -> WorkerRecord:
        device: dict[str, JsonValue] = {
            "index": number,
            "uuid": f"GPU-{number}",
            "name": "NVIDIA H100 80GB HBM3",
            "total_memory_mb": 81559,
            "used_memory_mb": 70000 + 17 * number,
            "utilization_percent": 90 + number % 10,
            "temperature_c": 50 + number % 30,
            "is_available": True,
        }
        return replace(
            worker_record(f"{self.name(number)}-{number:06x}"),
            host=HOST,
            host_id=f"{HOST}-1-000000",
            pid=1000 + number,
            visible_gpus=str(number),
            gpus={"devices": [device]},
            stats={"chat_active": self.chats, "chat_total": 7, "chat_refused": 0, "skips": 3},
            started_at=self.began,
        )

    @contextmanager
    def beating(self) -> Iterator["ToldNode"]:
        """Says that it lives until the end; the deployment is told first."""
        self.deployments.deploy_first(Deployment(model=MODEL), f"{HOST}-1-000000")
        self.beat()
        beats = Periodic("told node", BEAT_S, self.beat)
        beats.start()
        try:
            yield self
        finally:
            beats.stop()

    def beat(self) -> None:
        """One heartbeat of all that live, and the host's report."""
        with self._lock:
            alive = [number for number in range(self.n) if number not in self.ended]
            for number in alive:
                self.registry.heartbeat(self.worker(number))
            self._work(alive)
            self._beats += 1
            if self._beats % 5 == 1 or self._gone(alive):
                self._report(alive)

    def kill(self, numbers: Sequence[int]) -> None:
        """These workers end, as if by SIGKILL."""
        with self._lock:
            self.ended |= set(numbers)
            self._ended_at |= dict.fromkeys(numbers, time.time())
            for number in numbers:
                self.registry.remove(self.worker(number).id)
            self._report([number for number in range(self.n) if number not in self.ended])

    def revive(self) -> None:
        """All workers are there again."""
        with self._lock:
            self.ended.clear()
            self.beat()
            self._report(range(self.n))

    def _gone(self, alive: Sequence[int]) -> bool:
        return len(alive) < self.n

    def _report(self, alive: Sequence[int]) -> None:
        places = tuple(
            WorkerPlace(
                name=self.name(number),
                pid=1000 + number if number in alive else None,
                is_ready=number in alive,
                since=self._ended_at.get(number, self.began),
                restarts=int(number in self._ended_at),
                last_exit="killed by SIGKILL" if number in self._ended_at else None,
                last_exit_at=self._ended_at.get(number),
            )
            for number in range(self.n)
        )
        record = self.deployments.read()
        generation = record.generation if record else 0
        self.deployments.report(
            HostReport(
                id=f"{HOST}-1-000000",
                host=HOST,
                state=HostState.SERVING,
                generation=generation,
                model=MODEL,
                workers=self.n,
                ready=len(alive),
                vllm_version="0.32.0",
                places=places,
            )
        )
        lines = ["the engine is ready", "<b>no markup</b>"]
        children = [ChildLog(name=place.name, pid=place.pid, lines=lines) for place in places]
        self.deployments.store_logs(f"{HOST}-1-000000", HostLogs(host=HOST, workers=children))

    def _work(self, alive: Sequence[int]) -> None:
        current = self.rounds.current()
        if current is None or current.state is not RoundState.GENERATING:
            return
        for number in alive:
            n = NONCES - number % 3
            worker_id = self.worker(number).id
            lease: Any = lease_nonces(self.rounds, current, worker_id, n)
            if not isinstance(lease, Refusal):
                complete_lease(self.rounds, lease, worker_id, ["AAAA"] * n)

    def start_round(self, **changes: Any) -> str:
        return self.rounds.store(round_config(**{"url": None} | changes), RoundState.GENERATING)
