"""Hundreds of vectors of a cheat: each is a mismatch, none an error of the validator's request."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poc_core.errors import VectorError
from poc_core.schemes.artifact.encoding import decode_vector
from poc_core.state.jobs import JobStore
from tests.harness.samples import K_DIM, body, complete_batch, lease_batch, leased

GENERATE = "/api/v1/pow/generate"
OWN = base64.b64encode(bytes(2 * K_DIM)).decode()
N_VECTORS = 20  # of one request
N_REQUESTS = 15

Serve = Callable[..., Any]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=3,
)
BYTES = st.binary(max_size=100) | st.binary(min_size=2 * K_DIM, max_size=2 * K_DIM)
BASE64 = BYTES.map(lambda raw: base64.b64encode(raw).decode())
NEARLY = st.tuples(BASE64, st.text(max_size=2), st.integers(0, 40)).map(
    lambda t: t[0][: t[2]] + t[1] + t[0][t[2] :]
)
LONG = st.integers(1, 5000).map(lambda n: "A" * n)
VECTORS = st.lists(JSON | BASE64 | NEARLY | LONG, min_size=N_VECTORS, max_size=N_VECTORS)


def is_readable(vector: Any) -> bool:
    if not isinstance(vector, str):
        return False
    try:
        decode_vector(vector, K_DIM)
    except VectorError:
        return False
    return True


def requests(most: int) -> settings:
    return settings(
        max_examples=most,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@given(vectors=VECTORS)
@requests(N_REQUESTS)
def test_each_is_a_mismatch_and_the_verdict_comes(
    client: TestClient, jobs: JobStore, serve: Serve, vectors: list[Any]
) -> None:
    validate(client, jobs, serve, vectors)


@pytest.mark.slow
@given(vectors=VECTORS)
@requests(1000)
def test_so_it_is_in_a_thousand_validations(
    client: TestClient, jobs: JobStore, serve: Serve, vectors: list[Any]
) -> None:
    validate(client, jobs, serve, vectors)


def validate(client: TestClient, jobs: JobStore, serve: Serve, vectors: list[Any]) -> None:
    serve("w1")  # a heartbeat: keys expire while a test that lasts goes on
    nonces = list(range(len(vectors)))
    artifacts = [
        {"nonce": nonce, "vector_b64": vector}
        for nonce, vector in zip(nonces, vectors, strict=True)
    ]
    answer = client.post(GENERATE, json=body(nonces=nonces, validation={"artifacts": artifacts}))
    assert answer.status_code == 200, answer.text
    job_id = answer.json()["request_id"]
    lease = leased(lease_batch(jobs, job_id, 0, "w1"))
    assert complete_batch(jobs, job_id, 0, [OWN for _ in lease.nonces])
    assert jobs.finish(job_id)
    verdict = client.get(f"{GENERATE}/{job_id}").json()
    unreadable = {nonce for nonce in nonces if not is_readable(vectors[nonce])}
    assert (verdict["status"], verdict["n_total"]) == ("completed", len(nonces))
    assert unreadable <= set(verdict["mismatch_nonces"])
