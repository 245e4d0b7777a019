"""/console: a page without a key or foreign requests; its stream of events needs a key."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.app import create_app
from api.console import page
from api.edge.keys import KeyFile, Role
from api.routes.services import Services
from poc_core.records import RoundState
from poc_core.serving.deployments import ChildLog, HostLogs, HostReport, HostState
from poc_core.settings import Settings
from poc_core.state.deployments import DeploymentStore
from poc_core.state.jobs import JobStore
from poc_core.state.rounds import RoundStore
from tests.harness.samples import Clock, complete_batch, lease_batch, new_job, round_config

EVENTS = "/api/v1/console/events"
DEADLINE_S = 30.0
URL = "http://user:secret@receiver:9000/poc"
FILES = page.load()
OURS = {
    name: file.content.decode() for name, file in FILES.items() if not name.startswith("vendor/")
}


def test_the_page_and_its_files_are_served_as_what_they_are(client: TestClient) -> None:
    kinds = {"": "html", "/main.js": "javascript", "/vendor/preact.mjs": "javascript"}
    for path, kind in kinds.items():
        told = client.get(f"/console{path}").headers["content-type"]
        assert told == f"text/{kind}; charset=utf-8"


def test_with_a_slash_it_leads_to_the_page(client: TestClient) -> None:
    answer = client.get("/console/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "../console")


@pytest.mark.parametrize(
    "path", ["nothing.js", "../app.py", "%2e%2e/app.py", "../../../../etc/passwd"]
)
def test_nothing_but_its_files_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/console/{path}").status_code == 404


def test_a_file_that_is_known_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/console/console.css")
    again = client.get("/console/console.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_only_scripts_and_styles_of_ours_may_run(client: TestClient) -> None:
    policy = client.get("/console").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert client.get("/console").headers["x-content-type-options"] == "nosniff"


def test_the_page_has_nothing_inline(client: TestClient) -> None:
    html = client.get("/console").text
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", html) == []


@pytest.mark.parametrize("name", OURS)
def test_our_files_name_nobody_elses_and_make_no_markup_of_text(name: str) -> None:
    text = OURS[name]
    assert re.findall(r"(?:src|href|import|from|url|fetch)\W{1,3}(?:https?:)?//", text) == []
    markup = r"innerHTML|insertAdjacentHTML|document\.write|dangerously|\beval\(|new Function"
    assert re.findall(markup, text) == []


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith((".js", ".html"))])
def test_every_file_that_another_names_is_there(name: str) -> None:
    folder = Path(name).parent
    named = re.findall(r"from '\./([^']+)'", OURS[name]) + re.findall(
        r'(?:src|href)="console/([^"]+)"', OURS[name]
    )
    assert [other for other in named if (folder / other).as_posix() not in FILES] == []


def test_what_is_vendored_has_its_licence() -> None:
    names = {Path(name).name.partition(".")[0] for name in FILES if name.startswith("vendor/")} - {
        "VERSIONS"
    }
    assert {f"vendor/{name}.LICENSE.txt" for name in names} <= set(FILES)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


@pytest.fixture
def guarded(client: TestClient, keys: KeyFile) -> Any:
    """The API beyond loopback."""
    return create_app(Settings(api_keys_file=keys.path), services_of(client), "0.0.0.0")


def services_of(client: TestClient) -> Services:
    services: Services = client.app.state.services  # type: ignore[attr-defined]
    return services


async def asked(
    app: Any, method: str = "GET", key: str = "", n_events: int = 1
) -> tuple[int, list[dict[str, Any]]]:
    """Status and the first events of the stream; then the page is closed."""
    status, events, done = 0, list[dict[str, Any]](), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message.get("body", b"").startswith(b"data: "):
            events.append(json.loads(message["body"].removeprefix(b"data: ")))
        if message["type"] == "http.response.body" and (
            len(events) >= n_events or not message.get("more_body")
        ):
            done.set()

    headers = [(b"host", b"127.0.0.1:8000")] + (
        [(b"authorization", f"Bearer {key}".encode())] if key else []
    )
    scope: dict[str, Any] = {"type": "http", "method": method, "headers": headers}
    scope |= {"path": EVENTS, "raw_path": EVENTS.encode(), "query_string": b"", "root_path": ""}
    scope |= {"client": ("192.0.2.1", 1), "server": ("127.0.0.1", 8000), "scheme": "http"}
    scope |= {"http_version": "1.1", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    async with asyncio.timeout(DEADLINE_S):
        await app(scope, receive, send)
    return status, events


async def test_the_first_event_is_the_whole_state(client: TestClient) -> None:
    status, events = await asked(client.app)
    assert status == 200
    assert {"health", "node", "figures", "round", "workers", "work", "silent"} <= set(events[0])


async def test_a_page_that_is_closed_follows_no_longer(client: TestClient) -> None:
    await asked(client.app)
    live = services_of(client).live
    assert live.followers == 0
    async with asyncio.timeout(DEADLINE_S):
        while live.is_reading:
            await asyncio.sleep(0.005)


async def test_head_has_an_end(client: TestClient) -> None:
    assert await asked(client.app, "HEAD") == (200, [])


async def test_the_state_needs_a_key_and_the_page_none(guarded: Any, keys: KeyFile) -> None:
    assert (await asked(guarded))[0] == 401
    assert (await asked(guarded, key=keys.add("chat", [Role.CHAT])))[0] == 403
    status, events = await asked(guarded, key=keys.add("looks", [Role.READ]))
    assert (status, len(events)) == (200, 1)
    stranger = TestClient(guarded, client=("192.0.2.1", 1234))
    assert (
        stranger.get("/console").status_code == stranger.get("/console/main.js").status_code == 200
    )
    assert stranger.get("/api/v1/pow/status").status_code == 401


async def test_more_pages_than_there_is_room_for_are_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.console.MOST_PAGES", 0)
    assert (await asked(client.app))[0] == 503


def test_a_range_of_the_history_is_told_whole(client: TestClient) -> None:
    found = client.get("/api/v1/console/history", params={"step": 480}).json()
    assert (found["step_s"], len(found["chats"]), found["workers"]) == (480, 180, {})
    answer = client.get("/api/v1/console/history", params={"step": 7})
    assert (answer.status_code, "5, 20, 120, 480" in answer.text) == (422, True)


def test_the_log_tells_what_is_newer(client: TestClient, clock: Clock) -> None:
    events = services_of(client).events
    events.note("worker", "w ended")
    clock.now += 10
    events.note("worker", "w is ready")
    read = client.get("/api/v1/console/log", params={"after": clock.now - 5}).json()
    assert [event["text"] for event in read if event["kind"] == "worker"] == ["w is ready"]
    texts = [event["text"] for event in client.get("/api/v1/console/log").json()]
    assert {"w ended", "w is ready"} <= set(texts)


def test_a_jobs_page_has_its_workers_and_its_delivery(
    client: TestClient, jobs: JobStore, serve: Callable[..., object]
) -> None:
    serve("here/gpu0-0a1b2c")
    new = new_job([1, 2, 3])
    job_id = jobs.create(replace(new, request=new.request.model_copy(update={"url": URL})))
    lease_batch(jobs, job_id, 0, "here/gpu0-0a1b2c")
    complete_batch(jobs, job_id, 0, ["A" * 32] * 2)
    found = client.get(f"/api/v1/console/work/{job_id}").json()
    assert (found["workers"], found["n_done"], found["n_batches"]) == ({"here/gpu0": 2}, 2, 2)
    assert (found["url"], found["delivery"]["waiting"]) == ("http://***@receiver:9000/poc", 0)


def test_a_validations_page_has_the_distances(client: TestClient, jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1, 2], claimed={1: "A" * 32, 2: "A" * 32}))
    lease_batch(jobs, job_id, 0, "w1")
    complete_batch(jobs, job_id, 0, ["A" * 32] * 2)
    assert jobs.finish(job_id)
    verdict = client.get(f"/api/v1/console/work/{job_id}").json()["verdict"]
    assert verdict["distances"]["histogram"] == [[0.0001, 2]]


def test_a_rounds_page_has_its_configuration_and_no_password(
    client: TestClient, rounds: RoundStore
) -> None:
    round_id = rounds.store(round_config(url=URL), RoundState.GENERATING)
    answer = client.get(f"/api/v1/console/work/{round_id}")
    assert (answer.json()["kind"], answer.json()["status"]) == ("round", "generating")
    assert "secret" not in answer.text


@pytest.mark.parametrize("work_id", ["0" * 32, "current", "%2e%2e"])
def test_what_is_no_job_and_no_round_has_no_page(client: TestClient, work_id: str) -> None:
    assert client.get(f"/api/v1/console/work/{work_id}").status_code == 404


def test_a_workers_log_is_told_by_its_name(
    client: TestClient, redis: Redis, settings: Settings
) -> None:
    store = DeploymentStore(redis, settings)
    store.report(HostReport(id="h1-7", host="h1", state=HostState.IDLE, generation=0))
    children = [ChildLog(name="h1/cpu0", pid=None, lines=["Traceback", "<b>no</b>"])]
    store.store_logs("h1-7", HostLogs(host="h1", workers=children))
    found = client.get("/api/v1/console/worker", params={"name": "h1/cpu0"}).json()
    assert found == {"lines": ["Traceback", "<b>no</b>"], "stats": {}}
