"""POST /validate: distances judged by the round that validates, and why they cannot be."""

import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient

from poc_core.records import Lease
from poc_core.state.jobs import JobStore
from tests.harness.samples import MODEL, complete_batch, distance_body, lease_batch, round_body
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.usefixtures("a_worker")

POW = "/api/v1/pow"
BATCH = {"block_hash": "block", "block_height": 7, "public_key": "key"}


def validate(client: TestClient, nonces: list[int], distances: list[float]) -> Any:
    return client.post(f"{POW}/validate", json=BATCH | {"nonces": nonces, "dist": distances})


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([], "No distance round was initialised; send POST /init/validate first."),
        (["artifacts"], "No distance round was initialised; send POST /init/validate first."),
        (["init"], "The round was only initialised; send POST /phase/validate first."),
        (["init/generate"], "The round generates; send POST /phase/validate first."),
        (["init/validate", "stop"], "The round was stopped; send POST /init/validate first."),
    ],
    ids=str,
)
def test_without_a_round_that_validates_the_step_that_is_missing_is_named(
    client: TestClient, calls: list[str], says: str
) -> None:
    sent = {"stop": {}, "artifacts": round_body()}
    for call in calls:
        path = "init/generate" if call == "artifacts" else call
        answer = client.post(f"{POW}/{path}", json=sent.get(call, distance_body()))
        assert answer.status_code == 200, answer.text
    answer = validate(client, [1], [1.0])
    assert (answer.status_code, answer.json()["detail"]) == (400, says)


def test_of_nothing_the_verdict_comes_at_once(client: TestClient, jobs: JobStore) -> None:
    assert client.post(f"{POW}/init/validate", json=distance_body()).status_code == 200
    answer = validate(client, [], [])
    assert (answer.status_code, answer.json()["fraud_detected"]) == (200, False), answer.text
    assert jobs.active_jobs(MODEL) == []


def test_a_batch_is_judged_by_the_rounds_r_target(
    client: TestClient, jobs: JobStore, waiting_time: object
) -> None:
    def compute() -> None:
        wait_until(lambda: jobs.active_jobs(MODEL), "the batch")
        (job_id,) = jobs.active_jobs(MODEL)
        lease = lease_batch(jobs, job_id, 0, "w1")
        assert isinstance(lease, Lease)
        if complete_batch(jobs, job_id, 0, [1.0, 1.9]):
            jobs.finish(job_id)

    sent = distance_body(r_target=1.4)
    assert client.post(f"{POW}/init/validate", json=sent).status_code == 200
    worker = threading.Thread(target=compute)
    worker.start()
    answer = validate(client, [1, 2], [1.0, 1.1])
    worker.join(60)
    assert answer.status_code == 200, answer.text
    verdict = answer.json()
    assert (verdict["n_invalid"], verdict["fraud_detected"]) == (1, True)
