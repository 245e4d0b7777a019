"""What the console shows of the node."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import fakeredis
import pytest
from pydantic import JsonValue
from redis import Redis
from redis.exceptions import ResponseError

from api.console.view import View
from api.health import roster
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.records import JobStatus, ProofSpec, RoundState, WorkerRecord
from poc_core.serving.deployments import ChildLog, Deployment, HostLogs, HostReport, HostState
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.history import CHAT_MS, CHATS, bucket
from poc_core.state.jobs import JobStore
from poc_core.state.overview import Overview, Overviews
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.documents import ROOT
from tests.harness.samples import (
    MODEL,
    Clock,
    RecordingDispatcher,
    complete_batch,
    complete_lease,
    lease_batch,
    lease_nonces,
    new_job,
    round_config,
    worker_record,
)

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def services(redis: Redis, settings: Settings, clock: Clock) -> Services:
    return Services(settings, redis, cast(Dispatcher, RecordingDispatcher()), clock)


@pytest.fixture
def view(services: Services) -> View:
    return services.view()


def read(view: View) -> dict[str, Any]:
    return cast(dict[str, Any], dict(view.read()))


def test_an_idle_node(view: View) -> None:
    found = read(view)
    assert (found["problem"], found["round"], found["events"]) == (None, None, 0)
    assert (found["workers"], found["work"], found["rates"], found["gpus"]) == ([], [], {}, {})
    assert found["figures"]["chats"] is found["figures"]["gpu_use"] is None
    assert (found["node"]["state"], found["deployment"]["state"]) == ("IDLE", "idle")


def test_redis_away_is_a_problem_and_no_error(settings: Settings) -> None:
    server = fakeredis.FakeServer()
    view = Services(
        settings, fakeredis.FakeRedis(server=server), cast(Dispatcher, RecordingDispatcher())
    ).view()
    assert "work" in view.read()
    server.connected = False
    away = read(view)
    assert list(away) == ["now", "problem", "health"]
    assert [reason["kind"] for reason in away["health"]["reasons"]] == ["redis"]
    server.connected = True
    assert read(view)["problem"] is None


def test_a_busy_redis_is_a_problem_and_no_error(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_overviews: Overviews) -> Overview:
        raise ResponseError("BUSY Redis is busy running a script.")

    monkeypatch.setattr(Overviews, "read", refuse)
    (reason,) = read(view)["health"]["reasons"]
    assert (reason["kind"], reason["what"]) == ("redis", "Redis is busy with a script")


def test_a_workers_secret_is_not_shown(view: View, workers: WorkerRegistry) -> None:
    workers.heartbeat(replace(worker_record(), chat_secret="hush", stats={"slices": 7}))
    found = read(view)
    assert "hush" not in str(found)
    assert found["node"]["models"][MODEL]["max_seq_len"] == 1024


def test_a_worker_that_gives_no_sign_of_life_is_silent_at_once(
    view: View, serve: Callable[..., WorkerRecord], redis: Redis, settings: Settings
) -> None:
    serve("w1")
    found = read(view)
    assert (found["workers"][0]["state"], found["health"]["level"]) == ("ready", "ok")
    redis.pexpire("poc:worker:w1", int(1000 * (settings.worker_ttl_s - roster.SILENT_S)))
    found = read(view)
    assert (found["health"]["level"], found["figures"]["ready"]) == ("down", 0)
    serve("w2")
    found = read(view)
    states = [(worker["id"], worker["state"]) for worker in found["workers"]]
    assert states == [("w1", "silent"), ("w2", "ready")]
    assert (found["figures"]["ready"], found["figures"]["workers"]) == (1, 2)


@pytest.mark.parametrize(
    ("visible", "names", "use", "hottest"),
    [
        ("", ["0: A", "1: B"], 65, 60),
        ("1", ["1: B"], 40, 50),
        ("GPU-b", ["1: B"], 40, 50),
        ("7", [], None, None),
    ],
)
def test_a_worker_shows_the_gpus_that_it_is_pinned_to(
    view: View,
    workers: WorkerRegistry,
    visible: str,
    names: list[str],
    use: int | None,
    hottest: int | None,
) -> None:
    devices: list[Any] = [
        {"index": 0, "uuid": "GPU-a", "name": "A", "utilization_percent": 90, "temperature_c": 60},
        {"index": 1, "uuid": "GPU-b", "name": "B", "utilization_percent": 40, "temperature_c": 50},
    ]
    workers.heartbeat(replace(worker_record(), gpus={"devices": devices}, visible_gpus=visible))
    found = read(view)
    told = found["gpus"].get("w1", {})
    assert found["workers"][0]["gpus"] == names
    assert (told.get("use"), told.get("celsius")) == (use, hottest)
    assert found["figures"]["gpu_use"] == use


def test_a_gpu_of_two_workers_counts_once(view: View, workers: WorkerRegistry) -> None:
    shared: list[Any] = [{"index": 0, "name": "A", "utilization_percent": 90}]
    alone: list[Any] = [{"index": 0, "name": "A", "utilization_percent": 30}]
    for worker_id, host, devices in (("a", "h1", shared), ("b", "h1", shared), ("c", "h2", alone)):
        record = replace(worker_record(worker_id), host=host, gpus={"devices": devices})
        workers.heartbeat(record)
    assert read(view)["figures"]["gpu_use"] == 60


def test_a_round_its_rates_and_its_steps(
    view: View, rounds: RoundStore, serve: Callable[..., WorkerRecord], clock: Clock
) -> None:
    ids = ("here/gpu0-0a1b2c", "here/gpu1-3d4e5f")
    for worker_id in ids:
        serve(worker_id)
    rounds.store(round_config(url="http://user:secret@receiver/poc"), RoundState.GENERATING)
    current: Any = rounds.current()
    for worker_id, n in zip(ids, (10, 40), strict=True):
        lease: Any = lease_nonces(rounds, current, worker_id, n)
        complete_lease(rounds, lease, worker_id, ["AAAA"] * n)
    clock.now += 8
    found = read(view)
    assert found["rates"] == {"here/gpu0": 1.0, "here/gpu1": 4.0}
    assert found["figures"]["nonces_per_second"] == 5.0
    steps = found["steps5"]
    place = (1_000_000 - steps["first"]) // 5
    assert [values[place] for values in steps["workers"].values()] == [2.0, 8.0]
    assert (found["node"]["state"], found["round"]["outbox"]["failures"]) == ("GENERATING", 0)
    assert "secret" not in str(found)
    (work,) = found["work"]
    assert (work["kind"], work["status"], work["n_done"]) == ("round", "generating", 50)
    rounds.switch(current, RoundState.STOPPED)
    stopped = read(view)["round"]
    clock.now += 60
    assert read(view)["round"] == stopped  # nothing in it grows while nothing happens


def test_steps_are_told_again_when_another_is_over(
    view: View, services: Services, clock: Clock
) -> None:
    first = read(view)["steps5"]
    clock.now += 1
    assert read(view)["steps5"] == first
    services.history.add(1_000_000, {CHATS: 3, CHAT_MS: 10_000, bucket(0.5): 3})
    clock.now += 6
    found = read(view)
    told = found["steps5"]
    place = (1_000_000 - told["first"]) // 5
    assert (told["chats"][place], told["active"][place]) == (3, 2.0)
    assert told["first_token"][place] == found["figures"]["first_token"]
    assert 0.5 <= found["figures"]["first_token"] <= 0.6


def test_jobs_newest_first_with_their_verdicts(view: View, jobs: JobStore, clock: Clock) -> None:
    made = jobs.create(new_job([1, 2]))
    finish(jobs, made, ["AAAA", "BBBB"])
    clock.now += 1
    claimed = {1: "A" * 32, 2: "A" * 32}
    judged = jobs.create(new_job([1, 2], claimed=claimed))
    finish(jobs, judged, ["A" * 32, "A" * 32])
    waiting = jobs.create(new_job([5, 6, 7]))
    found = read(view)["work"]
    assert [job["id"] for job in found] == [waiting, judged, made]
    assert [job["status"] for job in found] == ["queued", "completed", "completed"]
    assert [job["n_done"] for job in found] == [0, 2, 2]
    assert found[0]["verdict"] is found[2]["verdict"] is None
    assert (found[1]["verdict"]["n_total"], found[1]["verdict"]["fraud_detected"]) == (2, False)
    assert found[2]["spec"]["options"] == {"k_dim": 12, "stronger_rng": False}
    jobs.cancel(waiting)
    assert [job["status"] for job in read(view)["work"]] == ["cancelled", "completed", "completed"]


def test_the_claims_of_a_validation_of_chains_are_not_sent_to_pages(
    services: Services, view: View, jobs: JobStore
) -> None:
    """The list is sent each second while a job runs, to each page."""
    claims: dict[str, JsonValue] = {str(nonce): [7] * 257 for nonce in range(200)}
    options: dict[str, JsonValue] = {"max_tokens": 256, "k_dim": 12, "enforced": claims}
    spec = ProofSpec(scheme="decode", block_hash="b", public_key="p", seq_len=256, options=options)
    job_id = jobs.create(replace(new_job(list(range(200))), spec=spec))
    (line,) = read(view)["work"]
    for shown in (line, services.work.job_page(job_id)):
        assert shown is not None
        assert shown["spec"]["options"] == {"max_tokens": 256, "k_dim": 12}
        assert len(json.dumps(shown)) < 1000


def test_the_oldest_job_that_runs_is_listed_beside_the_newest(
    view: View, jobs: JobStore, clock: Clock
) -> None:
    old = jobs.create(new_job([0]))
    for nonce in range(60):
        clock.now += 1
        jobs.fail(jobs.create(new_job([nonce])), "x")
    listed = read(view)["work"]
    assert len(listed) == 51
    assert (listed[-1]["id"], listed[0]["error"]) == (old, "x")


def test_a_job_that_expired_is_not_listed(view: View, jobs: JobStore, redis: Redis) -> None:
    job = jobs.create(new_job([0]))
    assert [found["id"] for found in read(view)["work"]] == [job]
    redis.delete(f"poc:job:{job}")
    assert read(view)["work"] == []


def finish(jobs: JobStore, job_id: str, values: list[str]) -> None:
    lease: Any = lease_batch(jobs, job_id, 0, "w1")
    complete_batch(jobs, job_id, lease.place, list(values))
    assert jobs.finish(job_id)
    record = jobs.read(job_id)
    assert record is not None
    assert record.status is JobStatus.COMPLETED


def test_what_is_deployed(view: View, redis: Redis, settings: Settings, clock: Clock) -> None:
    store = DeploymentStore(redis, settings, clock)
    report = HostReport(id="h1-7", host="h1", state=HostState.IDLE, generation=0)
    store.report(report)
    store.deploy(Deployment(model="tiny-llama"))
    starts = {"generation": 1, "state": HostState.STARTING, "model": "tiny-llama"}
    store.report(report.model_copy(update=starts))
    child = ChildLog(name="h1/cpu0", pid=None, lines=["Traceback", "<b>no</b>"])
    store.store_logs("h1-7", HostLogs(host="h1", workers=[child]))
    found = read(view)
    deployment = found["deployment"]
    assert (deployment["state"], deployment["model"]) == ("starting", "tiny-llama")
    assert deployment["hosts"][0]["state"] == "STARTING"
    assert found["events"] == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    ("works", "why"), [("true", "no chat or event explains it"), ("false", "no round or job is")]
)
def test_the_chart_names_why_nonces_fell(works: str, why: str) -> None:
    script = (
        f"import {{ fall }} from '{(ROOT / 'api/console/files/past.js').as_uri()}';"
        "const steps = [...Array(10).fill(9), ...Array(9).fill(0)], active = Array(19).fill(0);"
        "const past = {step_s: 5, first: 0, workers: {w: steps}, chats: steps, active};"
        f"console.log(fall(past, [], null, {works}).why)"
    )
    command = ["node", "--input-type=module", "--eval", script]
    assert why in subprocess.run(command, check=True, capture_output=True, text=True).stdout
