"""`proofline workers` with real vLLM on the CPU: a lost engine comes back, SIGTERM drains."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.supervise.fleet import WORKER_GRACE_S
from cli.supervise.processes import GUARD_MARGIN_S
from tests.integration.processes import Process, assert_all_gone, descendants, wait_until
from tests.local_compose import PROGRAMS, LocalCompose
from tests.marks import needs_vllm
from tests.samples import MODEL, body

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    needs_vllm,
]

READY_S = 240.0
JOB_S = 240.0
N = 2000


class Workers:
    """`proofline workers`, started as an operator starts it, and the API that it works for."""

    def __init__(self, compose: LocalCompose) -> None:
        self.compose = compose
        self.http = httpx.Client(base_url=compose.api_url, timeout=60, trust_env=False)

    def start(self, *options: str) -> None:
        command = [PROGRAMS["proofline"], "workers", "--model", MODEL, "--workers", "2", *options]
        environment = self.compose.environment("api") | {"PYTHONUNBUFFERED": "1"}
        self.compose.run("workers", command, environment)
        wait_until(lambda: len(self.ready()) == 2, "two ready workers", READY_S, 0.2)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.compose.processes["workers"]

    def ready(self) -> list[int]:
        workers = self.http.get("/api/v1/pow/status").json()["workers"]
        return sorted(worker["pid"] for worker in workers if worker["state"] == "ready")

    def engine_cores(self) -> list[Process]:
        return [process for process in descendants(self.process.pid) if "EngineCore" in process.name]

    def submit(self, batch_size: int = 8) -> str:
        job = body(nonces=list(range(N)), batch_size=batch_size, params={"model": MODEL, "seq_len": 256, "k_dim": 12})
        answer = self.http.post("/api/v1/pow/generate", json=job)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    def job(self, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/api/v1/pow/generate/{request_id}").json()
        return found

    def wait_middle(self, request_id: str) -> None:
        wait_until(lambda: self.job(request_id)["n_done"] > 100, "the job's middle", JOB_S)
        assert self.job(request_id)["status"] == "running"

    def assert_completes(self, request_id: str) -> None:
        """With every nonce once."""
        wait_until(lambda: self.job(request_id)["status"] not in ("queued", "running"), "the job's end", JOB_S, 0.2)
        job = self.job(request_id)
        assert job["status"] == "completed", job
        assert [artifact["nonce"] for artifact in job["artifacts"]] == list(range(N))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with LocalCompose(tmp_path_factory.mktemp("workers")) as compose:
        compose.start("api")
        compose.wait_healthy("api")
        running = Workers(compose)
        running.start()
        yield running
        running.http.close()


def test_a_lost_engine_comes_back_and_the_job_completes(workers: Workers) -> None:
    before, cores = workers.ready(), workers.engine_cores()
    assert len(cores) == 2
    request_id = workers.submit()
    workers.wait_middle(request_id)
    os.kill(cores[0].pid, signal.SIGKILL)
    workers.assert_completes(request_id)
    wait_until(lambda: len(workers.ready()) == 2 and workers.ready() != before, "another worker", READY_S, 0.2)
    kept = set(before) & set(workers.ready())
    assert len(kept) == 1, "the other worker was not to be touched"
    assert "ended (exit code 70); restarting it in 1 s" in workers.compose.log("workers")


def test_sigterm_drains_and_the_job_completes_after_a_new_start(workers: Workers) -> None:
    request_id = workers.submit()
    workers.wait_middle(request_id)
    below = descendants(workers.process.pid)
    workers.process.terminate()
    assert workers.process.wait(WORKER_GRACE_S + GUARD_MARGIN_S) == 0
    assert_all_gone(below, 0.1)
    done = workers.job(request_id)["n_done"]
    assert workers.job(request_id)["status"] == "running"
    assert 0 < done < N
    assert done % 8 == 0, "a batch in hand was broken off"
    # The rest needs no real engine here, and another would take a minute to load.
    workers.start("--engine", "synthetic", "--synthetic-step-ms", "5")
    workers.assert_completes(request_id)


@pytest.mark.parametrize(
    ("more_environment", "options", "reason"),
    [
        pytest.param(
            {"VLLM_CPU_KVCACHE_SPACE": "100000"},
            [],
            "the model does not fit: use more --tensor-parallel .* a smaller VLLM_CPU_KVCACHE_SPACE",
            id="too little memory",
        ),
        pytest.param({}, ["--", "--max-model-length", "512"], "its arguments are wrong", id="no argument of vLLM"),
    ],
)
def test_what_another_start_would_not_mend_ends_at_once(
    workers: Workers, tmp_path: Path, more_environment: dict[str, str], options: list[str], reason: str
) -> None:
    command = [PROGRAMS["proofline"], "workers", "--model", MODEL, *options]
    environment = workers.compose.environment("api") | more_environment
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=READY_S)
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(rf"worker-0 ended \(exit code \d\); not restarted: {reason}", said)
