"""Helpers for tests of a worker's turns with jobs."""

import json
import threading
from collections.abc import Callable, Iterable

from poc_core.records import JobRecord, NewJob, ProofSpec
from poc_core.state.jobs import JobStore
from tests.harness.samples import MODEL, REQUEST, SPEC, known, new_job, result_body
from tests.peers.fake_engine import FakeEngine, value
from workers.work import Work

MakeRunner = Callable[..., Work]


def read(jobs: JobStore, job_id: str) -> JobRecord:
    return known(jobs.read(job_id))


def artifacts(jobs: JobStore, job_id: str) -> list[tuple[int, str]]:
    body = known(result_body(jobs, job_id))
    return [(one["nonce"], one["vector_b64"]) for one in json.loads(body)["artifacts"]]


def expected(nonces: Iterable[int], spec: ProofSpec = SPEC) -> list[tuple[int, str]]:
    return [(nonce, value(spec, nonce)) for nonce in nonces]


def job_of(spec: ProofSpec, nonces: list[int], batch_size: int = 2) -> NewJob:
    return NewJob(MODEL, spec, REQUEST, nonces, batch_size, None)


class InBackground:
    """A turn on a thread of its own, as a Celery task has it."""

    def __init__(self, runner: Work) -> None:
        self._thread = threading.Thread(target=runner.run)

    def __enter__(self) -> "InBackground":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def chat_comes(engine: FakeEngine) -> None:
    engine.chat = 1


def chat_ends(engine: FakeEngine) -> None:
    engine.chat = 0


def validation(nonces: list[int], batch_size: int = 2) -> NewJob:
    claimed = {nonce: str(value(SPEC, nonce)) for nonce in nonces}
    return new_job(nonces, batch_size, claimed)
