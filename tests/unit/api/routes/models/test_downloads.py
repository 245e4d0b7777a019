"""Models that are being downloaded."""

import threading
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.models import downloads as model_downloads
from api.routes.services import Services
from poc_core.state.downloads import Download
from tests.harness.model_cache import COMMIT, MODELS, REPO, WHOLE, put
from tests.harness.samples import Clock
from tests.harness.waiting import wait_until


@pytest.fixture
def services(client: TestClient) -> Services:
    found: Services = client.app.state.services  # type: ignore[attr-defined]
    return found


def test_a_download_is_a_job_that_its_status_shows(
    client: TestClient, services: Services, clock: Clock, begun: list[Download]
) -> None:
    answer = client.post(f"{MODELS}/download", json={"hf_repo": REPO})
    assert (answer.status_code, answer.json()["status"]) == (202, "DOWNLOADING")
    assert [one.task_id for one in begun] == [answer.json()["task_id"]]
    status = client.post(f"{MODELS}/status", json={"hf_repo": REPO}).json()
    assert (status["status"], status["progress"]["start_time"]) == ("DOWNLOADING", clock.now)
    assert client.get(f"{MODELS}/list").json()["models"][0]["status"] == "DOWNLOADING"
    assert client.post(f"{MODELS}/download", json={"hf_repo": REPO}).status_code == 409
    services.downloads.store.end(begun[0], "HTTPError: 401")
    status = client.post(f"{MODELS}/status", json={"hf_repo": REPO}).json()
    assert (status["status"], status["error_message"]) == ("NOT_FOUND", "HTTPError: 401")
    assert client.post(f"{MODELS}/download", json={"hf_repo": REPO}).status_code == 202


def test_three_are_downloaded_at_a_time(
    client: TestClient, services: Services, begun: list[Download]
) -> None:
    for n in range(3):
        assert client.post(f"{MODELS}/download", json={"hf_repo": f"acme/m{n}"}).status_code == 202
    answer = client.post(f"{MODELS}/download", json={"hf_repo": "acme/m3"})
    assert (answer.status_code, int(answer.headers["Retry-After"]) > 0) == (429, True)
    services.downloads.store.end(begun[1])
    services.downloads.store.leave(begun[1].task_id)
    assert client.post(f"{MODELS}/download", json={"hf_repo": "acme/m3"}).status_code == 202


def test_what_is_there_is_not_downloaded_again(
    client: TestClient, cache: Path, begun: list[Download]
) -> None:
    put(cache, WHOLE)
    answer = client.post(f"{MODELS}/download", json={"hf_repo": REPO})
    assert (answer.status_code, answer.json()["status"], begun) == (202, "DOWNLOADED", [])


def test_deleting_what_is_being_downloaded_cancels_that(
    client: TestClient, services: Services
) -> None:
    client.post(f"{MODELS}/download", json={"hf_repo": REPO})
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).json()["status"] == "cancelled"
    assert services.downloads.store.running() == []


def test_deleting_a_model_cancels_the_downloads_of_all_its_revisions(
    client: TestClient, services: Services, cache: Path
) -> None:
    """Otherwise their files would be deleted while they arrive, and the rest come back."""
    put(cache, WHOLE)
    for commit in ("b" * 40, "c" * 40):
        sent = {"hf_repo": REPO, "hf_commit": commit}
        assert client.post(f"{MODELS}/download", json=sent).json()["status"] == "DOWNLOADING"
    assert client.post(f"{MODELS}/download", json={"hf_repo": "acme/other"}).status_code == 202
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).json()["status"] == "cancelled"
    assert [one.hf_repo for one in services.downloads.store.running()] == ["acme/other"]
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).json()["status"] == "deleted"


def test_offline_a_download_says_at_once_what_is_here(
    client: TestClient, cache: Path, begun: list[Download], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, WHOLE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    answer = client.post(f"{MODELS}/download", json={"hf_repo": REPO, "hf_commit": "b" * 40})
    assert (answer.status_code, begun) == (409, [])
    assert f"HF_HUB_OFFLINE forbids to ask the hub for {REPO}" in answer.json()["detail"]
    assert f"{cache} has its revisions {COMMIT} (main)" in answer.json()["detail"]


@pytest.mark.parametrize(
    "model",
    [
        *(
            {"hf_repo": name}
            for name in ("", "../../etc", "a/b/c", "a b", "-x/y", "a--b/c", "x" * 97, "/etc/passwd")
        ),
        *(
            {"hf_repo": REPO, "hf_commit": commit}
            for commit in ("", "../x", "a/b", "-h", "x" * 129)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/status"), ("POST", "/download"), ("DELETE", "")]
)
def test_what_is_no_repository_is_422(
    client: TestClient, begun: list[Download], method: str, path: str, model: dict[str, str]
) -> None:
    assert client.request(method, MODELS + path, json=model).status_code == 422
    assert begun == []


def test_a_download_whose_process_died_is_begun_again(
    client: TestClient, services: Services, begun: list[Download]
) -> None:
    client.post(f"{MODELS}/download", json={"hf_repo": REPO})
    services.downloads.tend()
    assert len(begun) == 1  # it has one that begins
    services.downloads.store.leave(begun[0].task_id)  # or its sign of life expired
    for _ in range(2):
        services.downloads.tend()
        assert [one.task_id for one in begun] == [begun[0].task_id] * 2


def test_a_download_of_a_machine_that_is_gone_goes_on_here(
    client: TestClient,
    services: Services,
    begun: list[Download],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after `docker compose up` with a new image: the container's name is another one then."""
    monkeypatch.setattr(model_downloads, "_LEFT_LOOKS", 3)
    client.post(f"{MODELS}/download", json={"hf_repo": REPO})
    services.downloads.machine = "created again"
    for _ in range(4):
        services.downloads.tend()
    assert len(begun) == 1  # its process lives
    services.downloads.store.leave(begun[0].task_id)
    for n_begun in (1, 1, 2, 2):
        services.downloads.tend()
        assert len(begun) == n_begun
    assert begun[1].task_id == begun[0].task_id


@pytest.mark.promise(
    "a client that starts and cancels downloads in a loop", "has at most three download processes"
)
def test_downloads_in_a_loop_with_cancelling_them_have_three_processes_at_most(
    client: TestClient, services: Services, begun: list[Download]
) -> None:
    def download() -> int:
        return int(client.post(f"{MODELS}/download", json={"hf_repo": REPO}).status_code)

    for status in (202, 202, 202, 429, 429):
        assert download() == status
        client.request("DELETE", MODELS, json={"hf_repo": REPO})
    assert len(begun) == 3
    services.downloads.store.leave(begun[0].task_id)
    assert download() == 202


def test_a_download_that_cannot_be_read_is_skipped_and_said_once(
    client: TestClient,
    services: Services,
    redis: Redis,
    begun: list[Download],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for repo in ("acme/unreadable", REPO):
        assert client.post(f"{MODELS}/download", json={"hf_repo": repo}).status_code == 202
    redis.hset("poc:downloads", "acme/unreadable@", '{"task_id": 1}')
    services.downloads.store.leave(begun[1].task_id)
    for _ in range(2):
        listed = client.get(f"{MODELS}/list").json()["models"]
        assert [one["model"]["hf_repo"] for one in listed] == [REPO]
        unreadable = {"hf_repo": "acme/unreadable"}
        assert client.post(f"{MODELS}/status", json=unreadable).json()["status"] == "NOT_FOUND"
        services.downloads.tend()
    assert begun[1:] == [begun[1]] * 2
    assert caplog.text.count("download 'acme/unreadable@' in Redis cannot be read") == 1
    assert client.request("DELETE", MODELS, json=unreadable).json()["status"] == "cancelled"


def test_requests_begin_downloads_beside_a_look_whether_others_live(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Running:
        """A process; while one is asked whether it runs, a request begins another download."""

        def poll(self) -> None:
            if repos:
                another = threading.Thread(target=begin, args=(repos.pop(),))
                another.start()
                another.join(0.1)

        terminate = wait = lambda *_: None

    def begin(repo: str) -> None:
        downloads.begin(Download(repo, repo, None, "m", 0.0))

    repos = [f"acme/m{n}" for n in range(9)]
    monkeypatch.undo()
    monkeypatch.setattr(model_downloads.subprocess, "Popen", lambda *_, **__: Running())
    downloads = services.downloads
    begin("acme/first")
    for _ in range(3):
        downloads.tend()
    wait_until(lambda: len(downloads.processes()) == 10)
