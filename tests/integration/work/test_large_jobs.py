"""The largest request that is allowed, 100,000 nonces, and what it costs the API."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.node import Node, run_node, synthetic_artifacts, tampered
from tests.integration.processes import MIB, peak_rss

pytestmark = pytest.mark.integration

N_NONCES = 100_000
BATCH_SIZE = 256
API_LIMIT = 300 * MIB


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with ExitStack() as exits:
        yield run_node(exits, workers=2, synthetic_step_ms=4.0)


@pytest.fixture(autouse=True)
def no_job_is_left(node: Node) -> Iterator[None]:
    """Cancels that of a test which failed."""
    yield
    node.cancel_all()


@pytest.fixture(scope="module")
def artifacts() -> Any:
    return synthetic_artifacts(range(N_NONCES))


def api_peak(node: Node) -> int:
    assert node.stack.api_pid is not None
    peak = peak_rss(node.stack.api_pid)
    print(f"the API held {peak / MIB:.0f} MiB at most")
    return peak


# A largest job to its end is half a minute of CPU time: `make test` has one of a tenth, and one of
# that size accepted and shown at work (test_more_than_may_wait_is_refused_until_there_is_room).
@pytest.mark.parametrize("n", [N_NONCES // 10, pytest.param(N_NONCES, marks=pytest.mark.slow)])
def test_a_job_is_accepted_in_one_request_and_fetched(node: Node, n: int) -> None:
    request_id = node.submit(range(n), batch_size=BATCH_SIZE)
    assert node.result(request_id, 240)["artifacts"] == synthetic_artifacts(range(n))
    assert api_peak(node) < API_LIMIT


@pytest.mark.slow
def test_a_validation_is_accepted_in_one_request_and_judged(node: Node, artifacts: Any) -> None:
    claimed, changed = tampered(artifacts, every=1000)
    request_id = node.submit(
        range(N_NONCES), batch_size=BATCH_SIZE, validation={"artifacts": claimed}
    )
    verdict = node.result(request_id, 240)
    assert (verdict["n_total"], verdict["mismatch_nonces"]) == (N_NONCES, changed)
    assert api_peak(node) < API_LIMIT


def test_one_nonce_more_is_refused_and_nothing_is_queued(node: Node) -> None:
    answer = node.generate(range(N_NONCES + 1))
    assert (answer.status_code, node.status()["queued_nonces"]) == (429, 0), answer.text


def test_more_than_may_wait_is_refused_until_there_is_room(node: Node) -> None:
    request_id = node.submit(range(N_NONCES), batch_size=BATCH_SIZE)
    node.wait_progress(request_id)
    answer = node.generate(range(N_NONCES))
    node.cancel(request_id)
    assert (answer.status_code, "retry-after" in answer.headers) == (429, True), answer.text
    assert node.job(request_id)["status"] == "cancelled"
    assert node.generate([1], wait=True).status_code == 200
    assert api_peak(node) < API_LIMIT


@pytest.mark.slow
def test_several_validations_keep_the_api_below_300_mb(node: Node, artifacts: Any) -> None:
    for _ in range(2):
        verdict = node.result(
            node.submit(
                range(N_NONCES), batch_size=BATCH_SIZE, validation={"artifacts": artifacts}
            ),
            240,
        )
        assert verdict["n_mismatch"] == 0
    assert api_peak(node) < API_LIMIT
