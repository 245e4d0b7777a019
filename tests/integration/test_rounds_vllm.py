"""A round on real vLLM engines, one of which is killed: the numbers are those of jobs, and none is missing."""

import time

import numpy as np
import pytest

from poc_core.encoding import decode_vector
from tests.marks import needs_vllm
from tests.receiver import Receiver
from tests.round_client import assert_complete, round_body, running_stack

pytestmark = [
    pytest.mark.integration,
    needs_vllm,
]

ROUND_S = 12.0
KILLED_AFTER_S = 4.0
LEASES_BACK_WITHIN_S = 60.0


def test_a_killed_worker_changes_nothing():
    with running_stack(ready_s=250, engine="vllm", dtype="float32", workers=2) as client, Receiver() as receiver:
        client.start(receiver)
        client.wait(lambda: len(client.stats()["workers"]) == 2, 60, "both workers at work")
        time.sleep(KILLED_AFTER_S)
        client.kill("worker-0")
        reached = client.processed()
        client.wait(lambda: set(range(reached)) <= set(receiver.nonces()), LEASES_BACK_WITHIN_S, "what it had leased")
        time.sleep(ROUND_S - KILLED_AFTER_S)
        client.stop()
        client.wait_delivered()
        assert_complete(client, receiver)
        sent = {artifact["nonce"]: artifact for p in receiver.round_payloads() for artifact in p.body["artifacts"]}
        nonces = list(sent)[:: len(sent) // 16]
        job = client.http.post("/api/v1/pow/generate", json=round_body(None, nonces=nonces, wait=True), timeout=120)
        assert job.status_code == 200, job.text
        of_job, of_round = (
            np.stack([decode_vector(artifact["vector_b64"], 12) for artifact in artifacts])
            for artifacts in (job.json()["artifacts"], [sent[nonce] for nonce in nonces])
        )
        assert np.linalg.norm(of_job - of_round, axis=1).max() <= 0.003
