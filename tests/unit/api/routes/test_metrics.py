"""/metrics: what Prometheus is told, from what Redis holds."""

from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from api.version import VERSION
from poc_core.records import RoundState
from poc_core.serving.deployments import HostReport, HostState
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    MODEL,
    Clock,
    complete_batch,
    complete_lease,
    known,
    lease_batch,
    lease_nonces,
    leased,
    new_job,
    round_config,
    worker_record,
)
from tests.harness.stored import outbox_status
from workers.chat_gate import GateStats
from workers.engines.validations import Validations


class Scraped:
    """The samples of one scrape, by name and labels."""

    def __init__(self, client: TestClient) -> None:
        self.answer = client.get("/metrics")
        assert self.answer.status_code == 200
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.answer.text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._samples.get((f"proofline_{name}", frozenset(labels.items())))

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._samples}


def test_an_empty_node_has_a_state_and_zeros(client: TestClient) -> None:
    scraped = Scraped(client)
    assert scraped.answer.headers["content-type"].startswith("text/plain; version=")
    assert scraped("round_state", state="IDLE") == 1
    assert scraped("round_state", state="GENERATING") == 0
    assert scraped("queued_nonces") == 0
    assert scraped("queued_nonces_limit") == 1000
    assert scraped("jobs", status="queued") == 0
    assert scraped("jobs_limit") == 200  # of 1,000 nonces
    assert scraped("silent_receivers") == 0
    assert "proofline_outbox_waiting" not in scraped.names


def test_open_metrics_are_given_to_who_asks(client: TestClient) -> None:
    answer = client.get(
        "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_jobs_by_status(client: TestClient, jobs: JobStore, workers: WorkerRegistry) -> None:
    workers.heartbeat(worker_record("w1"))
    waiting, running = jobs.create(new_job([0, 1])), jobs.create(new_job([2, 3]))
    queued = jobs.create(new_job([4, 5, 6]))
    done = jobs.create(new_job([7]))
    for job_id in (waiting, running, done):
        lease_batch(jobs, job_id, 0, "w1")
    jobs.note_waiting([waiting], "chat")
    jobs.note_waiting([queued], "chat")
    complete_batch(jobs, done, 0, ["v7"])
    jobs.finish(done)
    scraped = Scraped(client)
    assert scraped("jobs", status="queued") == 1
    assert scraped("jobs", status="running") == 2
    assert scraped("jobs_waiting_for_chat") == 2
    assert scraped("queued_nonces") == 7
    assert scraped("nonces_total") == 1


@pytest.fixture
def round_id(rounds: RoundStore, workers: WorkerRegistry, clock: Clock) -> str:
    """A round of which w1 computed four nonces and w2 two, one of them excluded."""
    for worker_id in ("w1", "w2"):
        workers.heartbeat(worker_record(worker_id))
    round_id = rounds.store(round_config(), RoundState.GENERATING)
    record = known(rounds.read(round_id))
    values: list[tuple[str, list[Any]]] = [("w1", ["a", "b", "c", "d"]), ("w2", ["e", None])]
    for worker_id, computed in values:
        lease = leased(lease_nonces(rounds, record, worker_id, len(computed)))
        complete_lease(rounds, lease, worker_id, computed)
    clock.now += 2
    return round_id


def test_a_round_per_worker_and_its_outbox(
    client: TestClient, round_id: str, settings: Settings, redis: Redis
) -> None:
    scraped = Scraped(client)
    assert scraped("round_state", state="GENERATING") == 1
    assert scraped("round_state", state="IDLE") == 0
    assert scraped("round_nonces_total", worker="w1", model=MODEL) == 4
    assert scraped("round_nonces_total", worker="w2", model=MODEL) == 2
    # The round is 2 s old.
    assert scraped("round_nonces_per_second", worker="w1", model=MODEL) == pytest.approx(2.0)
    assert scraped("round_excluded_nonces_total") == 1
    assert scraped("round_reported_total") == 5
    assert scraped("round_seconds") == pytest.approx(2)
    assert scraped("outbox_waiting") == 5
    assert scraped("outbox_limit") == settings.outbox_max_bytes
    assert scraped("outbox_bytes") == outbox_status(redis, round_id).waiting_bytes > 0
    assert scraped("outbox_full") == 0
    assert scraped("outbox_failures") == 0


def test_an_outbox_in_trouble(
    client: TestClient, round_id: str, redis: Redis, settings: Settings
) -> None:
    redis.hset(
        f"poc:outbox:{round_id}", mapping={"bytes": settings.outbox_max_bytes, "failures": 7}
    )
    scraped = Scraped(client)
    assert scraped("outbox_full") == 1
    assert scraped("outbox_failures") == 7


def test_a_stopped_round_shows_its_totals_but_no_rate(
    client: TestClient, round_id: str, rounds: RoundStore
) -> None:
    record = known(rounds.read(round_id))
    rounds.switch(record, RoundState.STOPPED)
    scraped = Scraped(client)
    assert scraped("round_state", state="STOPPED") == 1
    assert scraped("round_nonces_total", worker="w1", model=MODEL) == 4
    assert scraped("round_nonces_per_second", worker="w1", model=MODEL) == 0


def test_workers_and_their_chat(client: TestClient, workers: WorkerRegistry) -> None:
    gate = GateStats(chat_active=2, chat_total=40, chat_refused=3, skips=17, proof_busy_s=12.5)
    validations = Validations("pass")
    validations.add("pass", 0.25)
    stats = vars(gate) | validations.figures()
    workers.heartbeat(replace(worker_record("w1"), stats=stats))
    workers.heartbeat(worker_record("w2", state="starting"))
    scraped = Scraped(client)
    assert scraped("worker_up", worker="w1", model=MODEL, engine="synthetic", host="here") == 1
    assert scraped("worker_up", worker="w2", model=MODEL, engine="synthetic", host="here") == 0
    labels = {"worker": "w1", "model": MODEL}
    assert scraped("chat_active", **labels) == 2
    assert scraped("chat_requests_total", **labels) == 40
    assert scraped("chat_refused_total", **labels) == 3
    assert scraped("gate_skips_total", **labels) == 17
    assert scraped("proof_busy_seconds_total", **labels) == 12.5
    assert scraped("chat_active", worker="w2", model=MODEL) is None  # it has no chat yet
    for way, n, seconds in (("pass", 1, 0.25), ("steps", 0, 0)):
        assert scraped("chat_validations_total", **labels, way=way) == n
        assert scraped("chat_validation_seconds_total", **labels, way=way) == seconds


def test_validations_and_those_that_found_fraud(client: TestClient, jobs: JobStore) -> None:
    for claimed in ("AAAA" * 8, "AAAA" * 8, "forged"):
        job_id = jobs.create(new_job([0], claimed={0: claimed}))
        lease_batch(jobs, job_id, 0, "w1")
        complete_batch(jobs, job_id, 0, ["AAAA" * 8])
        jobs.finish(job_id)
        jobs.finish(job_id)  # twice counts once
    scraped = Scraped(client)
    assert (scraped("validations_total"), scraped("frauds_total")) == (3, 1)


def test_what_runs_here(client: TestClient, redis: Redis, settings: Settings, clock: Clock) -> None:
    assert Scraped(client)("build_info", version=VERSION, vllm="") == 1
    report = HostReport(
        id="h1", host="here", state=HostState.IDLE, generation=0, vllm_version="0.32.1"
    )
    DeploymentStore(redis, settings, clock).report(report)
    assert Scraped(client)("build_info", version=VERSION, vllm="0.32.1") == 1


def test_a_dead_worker_is_gone(client: TestClient, workers: WorkerRegistry) -> None:
    workers.heartbeat(worker_record("w1"))
    workers.remove("w1")
    assert "proofline_worker_up" not in Scraped(client).names
