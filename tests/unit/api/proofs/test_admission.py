"""What a job may ask for where workers of its model differ."""

from dataclasses import replace
from typing import Any

import pytest

from api.proofs.admission import deployed_limits
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import MODEL, worker_record

SMALL = {"max_seq_len": 64, "max_batch_tokens": 256, "max_sequences": 3}


@pytest.mark.parametrize("field", SMALL)
def test_the_worker_that_can_do_least_sets_the_limit(workers: WorkerRegistry, field: str) -> None:
    less: dict[str, Any] = {field: SMALL[field]}
    for name, changes in (("w1", {}), ("w2", less), ("w3", {})):
        record = worker_record(name)
        assert record.info is not None
        info = replace(record.info, max_sequences=100)
        workers.heartbeat(replace(record, info=replace(info, **changes)))
    found = deployed_limits(MODEL, workers)
    expected = {"max_seq_len": 1024, "max_batch_tokens": 8192, "max_sequences": 100}
    assert {one: getattr(found, one) for one in SMALL} == expected | less
