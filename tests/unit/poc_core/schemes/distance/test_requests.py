"""Batches of others' distances become jobs."""

from poc_core.fields import MAX_BATCH_SIZE
from poc_core.schemes.distance.requests import ProofBatchBody
from tests.harness.samples import DISTANCE_SPEC, round_config


def test_a_rounds_batch_size_beyond_what_a_job_may_have_is_cut() -> None:
    body = ProofBatchBody(
        block_hash="b", public_key="k", block_height=1, node_id=0, nonces=[1], dist=[0.5]
    )
    sizes = {
        size: body.job(round_config(spec=DISTANCE_SPEC, batch_size=size)).batch_size
        for size in (4, MAX_BATCH_SIZE, MAX_BATCH_SIZE + 1)
    }
    assert sizes == {4: 4, MAX_BATCH_SIZE: MAX_BATCH_SIZE, MAX_BATCH_SIZE + 1: MAX_BATCH_SIZE}
