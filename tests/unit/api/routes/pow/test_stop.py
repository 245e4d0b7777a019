"""A stop ends queued jobs; the status reports jobs."""

import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Connection, Redis

from poc_core.state.jobs import JobStore
from tests.harness.pow_routes import GENERATE, compute, submit
from tests.harness.samples import MODEL, body, round_body
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.usefixtures("a_worker")


def test_stop_cancels_what_is_queued(client: TestClient, jobs: JobStore) -> None:
    job_id = submit(client)
    answer = client.post("/api/v1/pow/stop")
    assert answer.json() == {
        "status": "OK",
        "pow_status": {"status": "STOPPED"},
        "cancelled_jobs": 1,
    }
    assert client.get(f"{GENERATE}/{job_id}").json()["status"] == "cancelled"
    assert client.post("/api/v1/pow/stop").json()["cancelled_jobs"] == 0


def test_stop_gives_up_callbacks_that_nobody_takes(
    client: TestClient, jobs: JobStore, redis: Redis
) -> None:
    job_id = submit(client, url="http://receiver:9000/dead", nonces=[1])
    compute(jobs, job_id, 0)
    assert redis.hget("poc:outbox:of_jobs", job_id) is not None
    redis.hset("poc:receiver:receiver:9000", "failures", 4)
    client.post("/api/v1/pow/stop")
    assert redis.hlen("poc:outbox:of_jobs") == 1
    redis.hset("poc:receiver:receiver:9000", "failures", 5)
    client.post("/api/v1/pow/stop")
    assert redis.hlen("poc:outbox:of_jobs") == 0
    assert client.get(f"/api/v1/pow/generate/{job_id}").json()["status"] == "completed"


def test_a_callback_takes_a_place_of_who_asked_for_it(client: TestClient, redis: Redis) -> None:
    job_id = submit(client, url="http://receiver:9000/x")
    place: Any = redis.hget("poc:outbox:of_jobs", job_id)
    _, receiver, client_name = place.decode().split(" ")
    assert (receiver, client_name) == ("receiver:9000", "testclient")


def test_stop_leaves_what_is_under_way_and_what_is_waited_for(
    client: TestClient, jobs: JobStore
) -> None:
    running = submit(client, batch_size=1)
    compute(jobs, running, 0)

    def stop_then_compute(job_id: str) -> None:
        assert client.post("/api/v1/pow/stop").json()["cancelled_jobs"] == 0
        compute(jobs, job_id, 0)

    waiting = threading.Thread(
        target=lambda: answers.append(client.post(GENERATE, json=body(wait=True))), daemon=True
    )
    answers: list[Any] = []
    waiting.start()
    wait_until(lambda: len(jobs.active_jobs(MODEL)) == 2, "both jobs")
    found = jobs.active_jobs(MODEL)
    stop_then_compute(next(job_id for job_id in found if job_id != running))
    waiting.join(60)
    assert answers[0].json()["status"] == "completed"
    assert client.get(f"{GENERATE}/{running}").json()["status"] == "running"


def test_status_shows_throughput_queue_and_workers(
    client: TestClient, jobs: JobStore, clock: Any
) -> None:
    job_id = submit(client, nonces=list(range(30)), batch_size=20)
    compute(jobs, job_id, 0)
    clock.now += 1
    answer = client.get("/api/v1/pow/status").json()
    assert (answer["status"], answer["state"], answer["config"]) == ("IDLE", "IDLE", None)
    assert (answer["stats"]["total_processed"], answer["stats"]["nonces_per_second"]) == (20, 2.0)
    assert (answer["queued_nonces"], answer["callbacks_waiting"]) == (10, 0)
    (worker,) = answer["workers"]
    assert (worker["id"], worker["model"], worker["state"]) == ("w1", MODEL, "ready")
    assert worker["info"]["max_batch_tokens"] == 8192


@pytest.mark.parametrize("state", ["no round", "a round"])
def test_the_status_asks_redis_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    if state == "a round":
        assert client.post("/api/v1/pow/init/generate", json=round_body()).status_code == 200
    assert client.get("/api/v1/pow/status").status_code == 200  # Redis has the script now
    send = Connection.send_packed_command
    sent: list[Any] = []

    def counted(connection: Connection, *args: Any, **options: Any) -> Any:
        sent.append(args)
        return send(connection, *args, **options)

    def asks_once() -> bool:
        sent.clear()
        assert client.get("/api/v1/pow/status").json()["workers"] != []
        return len(sent) == 1

    monkeypatch.setattr(Connection, "send_packed_command", counted)  # each waits for its answer
    wait_until(asks_once, "one command, in a go beside which the API's own threads ask nothing")
