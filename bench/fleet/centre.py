"""A node without workers: Redis, API and courier, whose workers a benchmark provides."""

import json
import time
from typing import Any

import httpx
import redis

from bench.harness.node import MODEL, NodeError, spec_of
from cli.supervise.ports import reserve_port
from cli.supervise.stack import API_GRACE_S, COURIER_GRACE_S, Stack
from poc_core.records import RoundConfig, RoundState
from poc_core.settings import load_settings
from poc_core.state import keys
from poc_core.state.rounds import RoundStore
from workers.engines.options import EngineOptions

SPEC = spec_of(64, "fleet")
NOBODY = "http://127.0.0.1:9"  # a url where nothing listens
READY_TIMEOUT_S = 600.0
_LOOK_S = 0.2


class Centre(Stack):
    """A stack that starts no workers."""

    def start(self) -> None:
        self.port = reserve_port(self.host, self.port)
        self._start_redis()
        self._api = self._start_child("api", self.api_command(), API_GRACE_S)
        self._courier = self._start_child("courier", self.courier_command(), COURIER_GRACE_S)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.base_url}/livez", trust_env=False).raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(_LOOK_S)
        raise NodeError(f"The API does not answer: {self.log_tail('api')}")

    @property
    def courier_pid(self) -> int | None:
        return self._courier.pid if self._courier else None

    def wait_for_workers(self, n: int) -> None:
        """Returns when `n` workers are ready."""
        deadline, n_ready = time.monotonic() + READY_TIMEOUT_S, 0
        with redis.Redis.from_url(str(self.redis_url)) as connection:
            while time.monotonic() < deadline:
                n_ready = _n_ready(connection)
                if n_ready >= n:
                    return
                time.sleep(_LOOK_S)
        raise NodeError(f"{n_ready} of {n} workers got ready.")


def centre(**env: str) -> Centre:
    """Returns a node without workers, with further environment variables."""
    return Centre(EngineOptions(model="", engine="synthetic"), env=env)


def start_round(redis_url: str, batch: int, url: str = NOBODY) -> None:
    """Stores a round that delivers to `url`, as the API would."""
    config = RoundConfig(
        model=MODEL, spec=SPEC, block_height=1, node_id=0, node_count=1, batch_size=batch, url=url
    )
    with redis.Redis.from_url(redis_url) as connection:
        settings = load_settings(redis_url=redis_url)
        RoundStore(connection, settings).store(config, RoundState.GENERATING)


def _n_ready(connection: Any) -> int:
    with connection.pipeline(transaction=False) as pipe:
        for worker in connection.zrange(keys.WORKERS, 0, -1):
            pipe.hget(keys.worker(worker.decode()), "record")
        return sum(json.loads(raw)["state"] == "ready" for raw in pipe.execute() if raw)
