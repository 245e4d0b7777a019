"""Real engines whose micro-batches meet what happens between two slices: memory that is short,
and a kill.
"""

import os
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from poc_core.schemes.artifact.encoding import decode_vector
from tests.harness.marks import needs_vllm
from tests.integration.processes import descendants
from tests.planted import worker as planted
from tests.stacks.round_client import FAST, LOG_LINES, MODEL, StackClient, round_body
from workers.engines.options import EngineOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.xdist_group("slices"),
    needs_vllm,
]

ASKED, FITS_AT_START, FITS_LATER = 4096, 3000, 700  # tokens
READY_S = 250.0


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the workers look into."""
    folder = tmp_path_factory.mktemp("plants")
    (folder / planted.MEMORY).write_text(str(FITS_AT_START))
    return folder


@pytest.fixture(scope="module")
def client(plants: Path) -> Iterator[StackClient]:
    """Two workers, in whose slices chat could come."""
    log: deque[str] = deque(maxlen=LOG_LINES)
    stack = planted.PlantedStack(
        EngineOptions(
            model=MODEL, dtype="float32", max_batch_tokens=ASKED, vllm_args=("--enforce-eager",)
        ),
        workers=2,
        env={**FAST, planted.FOLDER: str(plants)},
        on_line=lambda name, line: log.append(f"{name} | {line}"),
        announce=lambda message: log.append(f"stack | {message}"),
    )
    with stack, httpx.Client(base_url=stack.base_url, timeout=300, trust_env=False) as http:
        stack.wait_ready(READY_S)
        yield StackClient(stack, http, log)


def budgets(client: StackClient) -> list[int]:
    """The tokens of a micro-batch that each ready worker registered."""
    workers = client.status()["workers"]
    return [worker["info"]["max_batch_tokens"] for worker in workers if worker["state"] == "ready"]


def submit(client: StackClient, n: int, batch_size: int = 16) -> str:
    body = round_body(None, nonces=list(range(n)), batch_size=batch_size, wait=False)
    answer = client.http.post("/api/v1/pow/generate", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


def artifacts(client: StackClient, request_id: str, timeout_s: float = 120) -> np.ndarray:
    """Those of a job that completes, (n, 12), each nonce once and in order."""
    last: dict[str, Any] = {}

    def ended() -> bool:
        nonlocal last
        last = client.http.get(f"/api/v1/pow/generate/{request_id}").json()
        return last["status"] not in ("queued", "running")

    client.wait(ended, timeout_s, "the end of the job")
    assert last["status"] == "completed", last
    assert [one["nonce"] for one in last["artifacts"]] == list(range(len(last["artifacts"])))
    return np.stack([decode_vector(one["vector_b64"], 12) for one in last["artifacts"]])


def test_a_device_with_less_memory_than_asked_for_gets_a_smaller_budget_at_start(
    client: StackClient,
) -> None:
    assert budgets(client) == [ASKED // 2] * 2
    assert (
        len(
            [
                line
                for line in client.lines()
                if f"there is no memory for the requested {ASKED}" in line
            ]
        )
        == 2
    )


def test_memory_that_gets_short_later_halves_the_budget_and_fails_no_job(
    client: StackClient, plants: Path
) -> None:
    expected = artifacts(client, submit(client, 200))
    engines = client.stack.worker_pids()
    (plants / planted.MEMORY).write_text(str(FITS_LATER))
    found = artifacts(client, submit(client, 200))
    assert np.linalg.norm(found - expected, axis=1).max() <= 0.003
    assert any("too little memory" in line for line in client.lines())
    client.wait(lambda: ASKED // 8 in budgets(client), 300, "the smaller budget in the status")
    assert client.stack.worker_pids() == engines, "a worker died of it"
    (plants / planted.MEMORY).unlink()


def test_a_worker_that_is_killed_between_two_slices_loses_nothing(
    client: StackClient, plants: Path
) -> None:
    expected = artifacts(client, submit(client, 200))
    (plants / planted.PAUSE).touch()
    request_id = submit(client, 200)
    client.wait(lambda: (plants / planted.PAUSED).exists(), 300, "a micro-batch between two slices")
    paused = int((plants / planted.PAUSED).read_text())
    (worker,) = [
        pid
        for pid in client.stack.worker_pids()
        if paused in {child.pid for child in descendants(pid)}
    ]
    os.kill(worker, signal.SIGKILL)
    assert np.linalg.norm(artifacts(client, request_id) - expected, axis=1).max() <= 0.003
    before = client.processed()
    client.wait(lambda: len(budgets(client)) == 2, 300, "another worker")
    assert client.processed() == before
