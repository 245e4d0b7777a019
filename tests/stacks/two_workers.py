"""`proofline workers` with two real engines, started as by an operator, and their API."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.harness.chat_client import vllm_args
from tests.harness.waiting import wait_until
from tests.integration.processes import engine_cores
from tests.stacks.local_compose import PROGRAMS, LocalCompose
from tests.stacks.round_client import FAST, MODEL, RoundClient

READY_S = 600.0
# Chat is refused during a round, and first without one.
SETTINGS = {**FAST, "POC_CHAT_POLICY": "exclusive"}


class TwoWorkers(RoundClient):
    """Two workers and their API; both must be ready between two tests, see `wait_ready`."""

    def __init__(self, compose: LocalCompose, http: httpx.Client) -> None:
        super().__init__(http)
        self._compose = compose

    @property
    def redis_url(self) -> str:
        return self._compose.redis_url

    def run(self, *options: str) -> None:
        command = [PROGRAMS["proofline"], "workers", "--model", MODEL, "--workers", "2", *options]
        environment = self._compose.environment("worker") | os.environ | {"PYTHONUNBUFFERED": "1"}
        # vLLM's findings about the model's class, which each new home costs 10 s of CPU time.
        environment.pop("VLLM_CACHE_ROOT")
        self._compose.run("workers", command, environment)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Waits until two workers are ready, and killed ones forgotten."""
        wait_until(lambda: self.states() == ["ready", "ready"], "two ready workers", READY_S, 0.1)

    @property
    def supervisor(self) -> subprocess.Popen[bytes]:
        return self._compose.processes["workers"]

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status()["workers"]
        return found

    def states(self) -> list[str]:
        return [worker["state"] for worker in self.workers()]

    def cores(self) -> list[psutil.Process]:
        """The processes of the engines' cores."""
        return engine_cores(self.supervisor.pid)

    def lines(self) -> list[str]:
        names = [name for name in self._compose.processes if name not in ("redis", "secrets")]
        return [line for name in names for line in self._compose.log(name).splitlines()]


@contextmanager
def two_workers(folder: Path) -> Iterator[TwoWorkers]:
    with LocalCompose(folder, settings=SETTINGS) as compose:
        for name in ("api", "courier"):
            compose.start(name)
        compose.wait_healthy("api")
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(
            base_url=compose.api_url, timeout=300, limits=limits, trust_env=False
        ) as http:
            client = TwoWorkers(compose, http)
            client.run("--dtype", "float32", "--", *vllm_args())
            yield client
