"""What the console shows of the node."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import fakeredis
import pytest
from redis import Redis

from api.console.view import View
from api.proofs.dispatch import Dispatcher
from api.services import Services
from poc_core.records import SILENT_S, JobStatus, RoundState, WorkerRecord
from poc_core.serving.deployments import ChildLog, Deployment, HostLogs, HostReport, HostState
from poc_core.settings import Settings
from poc_core.state import DeploymentStore, JobStore, RoundStore, WorkerRegistry
from tests.harness.samples import (
    MODEL,
    Clock,
    RecordingDispatcher,
    new_job,
    round_config,
    worker_record,
)


@pytest.fixture
def services(redis: Redis, settings: Settings, clock: Clock) -> Services:
    return Services.create(settings, redis, cast(Dispatcher, RecordingDispatcher()), clock)


@pytest.fixture
def view(services: Services) -> View:
    return View(services)


def read(view: View) -> dict[str, Any]:
    return cast(dict[str, Any], dict(view.read()))


def test_an_idle_node(view: View) -> None:
    found = read(view)
    assert (found["problem"], found["round"], found["pace"]) == (None, None, None)
    assert (found["workers"], found["jobs"], found["logs"], found["machines"]) == ([], [], [], {})
    assert (found["node"]["state"], found["deployment"]["state"]) == ("IDLE", "idle")


def test_redis_away_is_a_problem_and_no_error(settings: Settings) -> None:
    server = fakeredis.FakeServer()
    view = View(
        Services.create(
            settings, fakeredis.FakeRedis(server=server), cast(Dispatcher, RecordingDispatcher())
        )
    )
    assert "jobs" in view.read()
    server.connected = False
    away = read(view)
    assert list(away) == ["problem", "health"]
    assert [reason["kind"] for reason in away["health"]["reasons"]] == ["redis"]
    server.connected = True
    assert read(view)["problem"] is None


def test_a_workers_secret_is_not_shown(view: View, workers: WorkerRegistry) -> None:
    workers.heartbeat(replace(worker_record(), chat_secret="hush", stats={"slices": 7}))
    found = read(view)
    assert "hush" not in str(found)
    assert found["workers"][0]["stats"] == {"slices": 7}
    assert found["node"]["models"][MODEL]["max_seq_len"] == 1024


def test_a_worker_that_gives_no_sign_of_life_is_silent_at_once(
    view: View, serve: Callable[..., WorkerRecord], redis: Redis, settings: Settings
) -> None:
    serve("w1")
    found = read(view)
    assert (found["workers"][0]["is_silent"], found["health"]["level"]) == (False, "ok")
    redis.pexpire("poc:worker:w1", int(1000 * (settings.worker_ttl_s - SILENT_S)))
    found = read(view)
    assert (found["health"]["level"], found["seats"][0]["state"]) == ("down", "silent")
    serve("w2")
    assert [(worker["id"], worker["is_silent"]) for worker in read(view)["workers"]] == [
        ("w1", True),
        ("w2", False),
    ]


@pytest.mark.parametrize(
    ("visible", "names"),
    [("", ["0: A", "1: B"]), ("1", ["1: B"]), ("GPU-b", ["1: B"]), ("7", [])],
)
def test_a_worker_shows_the_gpus_that_it_is_pinned_to(
    view: View, workers: WorkerRegistry, visible: str, names: list[str]
) -> None:
    devices: list[Any] = [
        {"index": 0, "uuid": "GPU-a", "name": "A"},
        {"index": 1, "uuid": "GPU-b", "name": "B"},
    ]
    workers.heartbeat(replace(worker_record(), gpus={"devices": devices}, visible_gpus=visible))
    found = read(view)
    assert found["workers"][0]["devices"] == names
    assert found["machines"] == {"here": devices}


def test_a_round_and_its_pace(
    view: View, rounds: RoundStore, serve: Callable[..., WorkerRecord], clock: Clock
) -> None:
    serve("w1")
    clock.now = 1_000_000.0
    rounds.store(round_config(url="http://user:secret@receiver/poc"), RoundState.GENERATING)
    current = rounds.current()
    assert current is not None
    for n, wait_s in ((4, 6.0), (2, 11.0), (3, 5.0)):  # within steps 0, 1 and 3
        lease: Any = rounds.lease(current, "w1", n)
        rounds.complete(lease, "w1", ["AAAA"] * n)
        clock.now += wait_s
        read(view)
    found = read(view)
    assert found["pace"] == {
        "round": current.round_id,
        "first": 1_000_000,
        "step_s": 5,
        "counts": [4, 2, 0, 3],
    }
    # A page that comes later gets the same pace.
    assert read(View(view_services(view)))["pace"] == found["pace"]
    shown = found["round"]
    assert (
        shown["state"],
        shown["total_processed"],
        shown["workers"]["w1"]["total_processed"],
    ) == ("GENERATING", 9, 9)
    assert "secret" not in str(found)
    rounds.switch(current, RoundState.STOPPED)
    clock.now += 60
    serve("w1")
    stopped = read(view)
    assert stopped["pace"] == found["pace"]
    assert read(view)["round"] == stopped["round"]  # nothing in it grows while nothing happens


def view_services(view: View) -> Services:
    services: Services = vars(view)["_services"]
    return services


def test_a_pace_is_that_of_the_last_hour(view: View, rounds: RoundStore, clock: Clock) -> None:
    rounds.store(round_config(), RoundState.GENERATING)
    read(view)
    clock.now += 2 * 3600
    assert len(read(view)["pace"]["counts"]) == 720


def test_jobs_newest_first_with_their_verdicts(view: View, jobs: JobStore, clock: Clock) -> None:
    made = jobs.create(new_job([1, 2]))
    finish(jobs, made, ["AAAA", "BBBB"])
    clock.now += 1
    claimed = {1: "A" * 32, 2: "A" * 32}
    judged = jobs.create(new_job([1, 2], claimed=claimed))
    finish(jobs, judged, ["A" * 32, "A" * 32])
    waiting = jobs.create(new_job([5, 6, 7]))
    found = read(view)["jobs"]
    assert [job["id"] for job in found] == [waiting, judged, made]
    assert [job["status"] for job in found] == ["queued", "completed", "completed"]
    assert [job["n_done"] for job in found] == [0, 2, 2]
    assert found[0]["verdict"] is found[2]["verdict"] is None
    assert (found[1]["verdict"]["n_total"], found[1]["verdict"]["fraud_detected"]) == (2, False)
    assert found[2]["spec"]["options"] == {"k_dim": 12, "stronger_rng": False}
    jobs.cancel(waiting)
    assert [job["status"] for job in read(view)["jobs"]] == ["cancelled", "completed", "completed"]


def test_the_oldest_job_that_runs_is_listed_beside_the_newest(
    view: View, jobs: JobStore, clock: Clock
) -> None:
    old = jobs.create(new_job([0]))
    for nonce in range(40):
        clock.now += 1
        jobs.fail(jobs.create(new_job([nonce])), "x")
    listed = read(view)["jobs"]
    assert len(listed) == 31
    assert (listed[-1]["id"], listed[0]["error"]) == (old, "x")


def test_a_job_that_expired_is_not_listed(view: View, jobs: JobStore, redis: Redis) -> None:
    job = jobs.create(new_job([0]))
    assert [found["id"] for found in read(view)["jobs"]] == [job]
    redis.delete(f"poc:job:{job}")
    assert read(view)["jobs"] == []


def finish(jobs: JobStore, job_id: str, values: list[str]) -> None:
    lease: Any = jobs.lease(job_id, 0, "w1")
    jobs.complete(job_id, lease.place, list(values))
    assert jobs.finish(job_id)
    record = jobs.read(job_id)
    assert record is not None
    assert record.status is JobStatus.COMPLETED


def test_what_is_deployed_and_what_its_workers_wrote(
    view: View, redis: Redis, settings: Settings, clock: Clock
) -> None:
    store = DeploymentStore(redis, settings, clock)
    report = HostReport(id="h1-7", host="h1", state=HostState.IDLE, generation=0)
    store.report(report)
    store.deploy(Deployment(model="tiny-llama"))
    store.report(
        report.model_copy(
            update={"generation": 1, "state": HostState.STARTING, "model": "tiny-llama"}
        )
    )
    logs = HostLogs(
        host="h1", workers=[ChildLog(name="h1/cpu0", pid=None, lines=["Traceback", "<b>no</b>"])]
    )
    store.tell_logs("h1-7", logs)
    found = read(view)
    assert (found["deployment"]["state"], found["deployment"]["model"]) == (
        "starting",
        "tiny-llama",
    )
    assert found["deployment"]["hosts"][0]["state"] == "STARTING"
    assert found["logs"] == [logs.model_dump()]
    store.leave("h1-7")
    assert read(view)["logs"] == []
