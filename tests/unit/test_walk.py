"""The walk of one nonce through the files that docs/architecture.md lists, on a fake engine."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fastapi.testclient import TestClient

from poc_core.schemes.requests import PLACE_EXAMPLE
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import MODEL, work_of, worker_record
from tests.peers.fake_engine import FakeEngine
from workers.proofs import Proofs
from workers.work import Work

ROOT = Path(__file__).resolve().parents[2]
NONCE = 7734255501
MOST_FILES = 30


def listed() -> set[str]:
    """The files of the walk, as the page's table and the sentence below it have them."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = page.split("of a job passes through these files")[1].split("\n\n")[1:3]
    return set(re.findall(r"`([\w/]+\.(?:py|lua))`", "".join(walk)))


@contextmanager
def noted() -> Iterator[set[str]]:
    """The product's files whose functions are given the nonce, or give it back, meanwhile."""
    found: set[str] = set()

    def look(frame: FrameType, event: str, given: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or ROOT not in path.parents:
            return
        name = str(path.relative_to(ROOT))
        if name.startswith(("api/", "poc_core/", "workers/")):
            seen = frame.f_locals.values() if event == "call" else [given]
            if any(str(NONCE) in repr(one) for one in seen):
                found.add(name)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_no_other_file_is_given_the_nonce(
    client: TestClient, jobs: JobStore, workers: WorkerRegistry
) -> None:
    workers.heartbeat(worker_record("w1"))
    params = {"model": MODEL, "seq_len": 16, "k_dim": 12}
    body = PLACE_EXAMPLE | {"nonces": [NONCE], "params": params}
    with noted() as found:
        proofs = Proofs(FakeEngine())
        work = Work(proofs, work_of(jobs, "w1"))
        job_id = client.post("/api/v1/pow/generate", json=body).json()["request_id"]
        work.run()
        answer = client.get(f"/api/v1/pow/generate/{job_id}").json()
        proofs.stop()
    assert [one["nonce"] for one in answer["artifacts"]] == [NONCE]
    assert found <= listed(), found - listed()
    assert len(listed()) <= MOST_FILES
    assert {
        "api/proofs/admission.py",
        "workers/pipeline.py",
        "poc_core/state/job_results.py",
    } <= found
