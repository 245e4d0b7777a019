"""The segments of a PoC challenge: rounds with their own hashes, nonces and receivers."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import redis

from bench.faults.reference import same_artifacts
from bench.faults.work import Expected
from bench.harness.computed import Computed, last_round
from poc_core.fields import MAX_NONCE
from poc_core.state import keys
from tests.peers.receiver import Receiver, unrepeated
from tests.stacks.round_client import RoundClient, round_body

# Most seconds until a receiver answers.
LATE_S = 0.5
# Share of the receivers that answer 503 at first, and for how many seconds.
NOT_READY, NOT_READY_S = 0.2, 1.0


@dataclass
class Segment:
    """One segment and its receiver, which listens until `close`."""

    number: int
    receiver: Receiver = field(default_factory=Receiver)

    def __post_init__(self) -> None:
        rng = random.Random(self.number)
        self.block_hash = rng.randbytes(32).hex()
        self.node_count = rng.randint(1, 8)
        self.node_id = rng.randrange(self.node_count)
        self.path = f"/{self.number}/tiny%252Fqwen3"
        self.receiver.delay_s = rng.uniform(0, LATE_S)
        self.receiver.__enter__()
        if rng.random() < NOT_READY:
            self.receiver.status = 503
            threading.Timer(NOT_READY_S, setattr, (self.receiver, "status", 200)).start()

    def run(self, client: RoundClient, connection: redis.Redis, seconds: float) -> float:
        """Runs the segment on the node; returns its nonces/s."""
        url = {"url": self.receiver.url + self.path}
        body = round_body(
            None,
            block_hash=self.block_hash,
            block_height=500 * self.number,
            node_id=self.node_id,
            node_count=self.node_count,
        )
        client.start(None, **body | url)
        time.sleep(seconds)
        client.stop()
        computed = last_round(connection)
        assert computed is not None
        self.computed: Computed = computed
        stats = client.stats()
        return float(stats["total_processed"] / stats["elapsed_seconds"])

    def is_over(self, connection: redis.Redis) -> bool:
        """Returns whether everything is delivered and no worker holds a lease of the segment."""
        names = [f"{keys.round(self.round_id)}:leases", f"{keys.outbox(self.round_id)}:entries"]
        return connection.exists(*names) == 0

    @property
    def round_id(self) -> str:
        return self.computed.round_id

    def close(self, expected: Expected, n_values: int | None) -> tuple[int, list[str]]:
        """Returns the number of nonces that came, and a sentence for each problem.

        `n_values`: the number of values that are computed again; None for all.
        """
        self.receiver.go_away()
        try:
            payloads = unrepeated(self.receiver.taken(f"{self.path}/generated"))
        except AssertionError as error:
            return 0, [f"segment {self.number}: {error}"]
        artifacts = [artifact for payload in payloads for artifact in payload.body["artifacts"]]
        nonces = [artifact["nonce"] for artifact in artifacts]
        sequence = range(self.node_id, MAX_NONCE + 1, self.node_count)
        problems = self.computed.problems(nonces, sequence)
        if n_values is not None:
            artifacts = random.Random(self.number).sample(artifacts, min(n_values, len(artifacts)))
        right = expected(self.block_hash, [artifact["nonce"] for artifact in artifacts])
        if not same_artifacts(artifacts, right):
            problems.append(f"segment {self.number}: wrong values")
        return len(nonces), problems
