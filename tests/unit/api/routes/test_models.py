"""Models in the Hugging Face cache: what lies there, what is being downloaded, what is deleted."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from redis import Redis

from api.models import downloads as model_downloads
from api.models.cache import ModelCache
from api.models.downloads import Downloads
from api.routes.services import Services
from poc_core.state.downloads import Download
from tests.harness.samples import Clock
from tests.harness.waiting import wait_until

MODELS = "/api/v1/models"
REPO = "acme/small"
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Download]:
    """The downloads whose processes would have been started."""
    begun: list[Download] = []
    monkeypatch.setattr(Downloads, "begin", lambda _, download: begun.append(download))
    monkeypatch.setattr(model_downloads, "LOOK_S", 1000.0)  # tests look themselves
    return begun


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ModelCache, "path", tmp_path / "hub")
    return tmp_path / "hub"


@pytest.fixture
def services(client: TestClient) -> Services:
    found: Services = client.app.state.services  # type: ignore[attr-defined]
    return found


def put(cache: Path, files: dict[str, str], repo: str = REPO, commit: str = COMMIT) -> Path:
    """As huggingface_hub leaves a repository."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for name, text in files.items():
        (folder / "blobs" / f"{commit[:4]}-{name}").write_text(text)
        (snapshot / name).symlink_to(folder / "blobs" / f"{commit[:4]}-{name}")
    return folder


SHARDS = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
LONG = json.dumps({"weight_map": {"a": "x" * 300}})
BOTH = {"model-1.safetensors": "x", "model-2.safetensors": "y"}
TOKENIZED = {"config.json": "{}", "tokenizer.json": "{}"}
WHOLE = {**TOKENIZED, "model.safetensors": "x" * 1000}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (WHOLE, "DOWNLOADED"),
        ({"config.json": "{}"}, "PARTIAL"),
        ({"model.safetensors": "x"}, "PARTIAL"),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": SHARDS,
                "model-1.safetensors": "x",
            },
            "PARTIAL",
        ),
        ({**TOKENIZED, "model.safetensors.index.json": SHARDS, **BOTH}, "DOWNLOADED"),
        ({"config.json": "{}", "model.safetensors.index.json": SHARDS, **BOTH}, "PARTIAL"),
        ({**TOKENIZED, "model.safetensors.index.json": LONG, **BOTH}, "PARTIAL"),
        ({**TOKENIZED, "model-00001-of-00002.safetensors": "x"}, "PARTIAL"),
        ({**TOKENIZED, "model-00001-of-00001.safetensors": "x"}, "DOWNLOADED"),
        ({**TOKENIZED, "model.safetensors": ""}, "PARTIAL"),
        ({**TOKENIZED, "training_args.bin": "x"}, "PARTIAL"),
        ({**TOKENIZED, "model.onnx": "x"}, "PARTIAL"),
        (
            {**TOKENIZED, "model.safetensors.index.json": SHARDS, "pytorch_model.bin": "x"},
            "PARTIAL",
        ),
        (
            {**TOKENIZED, "model.safetensors": "x", "pytorch_model.bin.index.json": SHARDS},
            "DOWNLOADED",
        ),
        ({"params.json": "{}", "tekken.json": "{}", "consolidated.safetensors": "x"}, "DOWNLOADED"),
    ],
    ids=[
        *("one file", "no weights", "no configuration", "a shard is missing", "all shards"),
        *(
            "no tokenizer",
            "a name that no disk takes",
            "half a model without an index",
            "one shard of one",
            "empty weights",
        ),
        *("what training left", "another engine's form", "not the preferred form"),
        *("an index of another form", "Mistral's own form"),
    ],
)
def test_the_status_tells_what_is_there(
    client: TestClient, cache: Path, files: dict[str, str], expected: str
) -> None:
    put(cache, files)
    for commit in (None, COMMIT):
        model = {"hf_repo": REPO, "hf_commit": commit}
        answer = client.post(f"{MODELS}/status", json=model)
        assert answer.json() == {
            "model": model,
            "status": expected,
            "progress": None,
            "error_message": None,
        }


def test_without_a_cache_nothing_is_there(client: TestClient) -> None:
    assert client.post(f"{MODELS}/status", json={"hf_repo": REPO}).json()["status"] == "NOT_FOUND"
    assert client.get(f"{MODELS}/list").json() == {"models": []}
    assert client.get(f"{MODELS}/space").json()["cache_size_gb"] == 0


def test_another_commit_than_asked_for_is_not_it(client: TestClient, cache: Path) -> None:
    put(cache, WHOLE)
    model = {"hf_repo": REPO, "hf_commit": "b" * 40}
    assert client.post(f"{MODELS}/status", json=model).json()["status"] == "NOT_FOUND"


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


def test_a_model_is_deleted_by_commit_or_whole(client: TestClient, cache: Path) -> None:
    folder = put(cache, WHOLE)
    put(cache, WHOLE, commit="c" * 40)
    assert (
        client.request("DELETE", MODELS, json={"hf_repo": REPO, "hf_commit": COMMIT}).json()[
            "status"
        ]
        == "deleted"
    )
    assert [path.name for path in (folder / "snapshots").iterdir()] == ["c" * 40]
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).status_code == 200
    assert not folder.exists()
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).status_code == 404


def test_deleting_what_is_being_downloaded_cancels_that(
    client: TestClient, services: Services
) -> None:
    client.post(f"{MODELS}/download", json={"hf_repo": REPO})
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).json()["status"] == "cancelled"
    assert services.downloads.store.running() == []


def test_a_model_that_is_served_is_not_deleted(
    client: TestClient, cache: Path, serve: Callable[..., Any]
) -> None:
    put(cache, WHOLE)
    serve("w1", model=REPO)
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).status_code == 409


@dataclass(frozen=True)
class Bad:
    """An entry of the cache that cannot be read; `why`: what the answers say of it."""

    plant: Callable[[Path], object]  # takes the folder of a whole model
    why: str
    commit: str | None = COMMIT
    is_deleted: bool = True


def _in_place_of(text: str, name: str = "") -> Callable[[Path], object]:
    """A file where the folder of the repository, or a part of it, is due."""

    def plant(folder: Path) -> None:
        place = folder / name if name else folder
        shutil.rmtree(place)
        place.write_text(text)

    return plant


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "snapshots" / COMMIT / name).write_text(text)


def _without_permission(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).chmod(0)


def _dangling(folder: Path) -> None:
    (folder / "blobs" / f"{COMMIT[:4]}-model.safetensors").unlink()


def _pipe(name: str) -> Callable[[Path], object]:
    """A pipe that nobody writes to: who reads it waits for ever."""

    def plant(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return plant


def _linked_to(target: str, name: str) -> Callable[[Path], object]:
    def plant(folder: Path) -> None:
        place = folder / "snapshots" / COMMIT / name
        place.unlink()
        place.symlink_to(target)

    return plant


def _link_to_nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "nowhere")


BAD = {
    "an index that is no JSON": Bad(_write("model.safetensors.index.json", "{"), "is no JSON"),
    "an index that is a list": Bad(_write("model.safetensors.index.json", "[]"), "no JSON object"),
    "an index of numbers": Bad(
        _write("model.safetensors.index.json", '{"weight_map": {"a": 1}}'), "is no index"
    ),
    "JSON without an end": Bad(_write("tokenizer_config.json", "[" * 100_000), "is no JSON"),
    "a configuration of binary": Bad(_write("config.json", "PK\3\4"), "is no JSON"),
    "weights that are gone": Bad(_dangling, "is a link to nothing"),
    "a pipe for a configuration": Bad(_pipe(f"snapshots/{COMMIT}/config.json"), "is no file"),
    "an endless configuration": Bad(_linked_to("/dev/zero", "config.json"), "is no file"),
    "a folder for a tokenizer": Bad(_linked_to("/tmp", "tokenizer.json"), "is no file"),
    "a name that is no text": Bad(
        _write(os.fsdecode(b"\xff.json"), "{"), "\\udcff.json is no JSON"
    ),
    "a shard of a billion": Bad(
        _write("model-1-of-1000000000.safetensors", "x"), "1000000000 shards"
    ),
    "a link to nothing": Bad(_link_to_nothing, "is a link to nothing", None),
    "a file for a repository": Bad(_in_place_of("x"), "Not a directory", None),
    "a file for snapshots": Bad(_in_place_of("x", "snapshots"), "Not a directory", None),
    "a file for a revision": Bad(_in_place_of("x", f"snapshots/{COMMIT}"), "Not a directory"),
    "a repository without permission": Bad(
        _without_permission(""), "Permission denied", None, is_deleted=False
    ),
    "snapshots without permission": Bad(
        _without_permission("snapshots"), "Permission denied", None, is_deleted=False
    ),
    "a revision without permission": Bad(
        _without_permission(f"snapshots/{COMMIT}"), "Permission denied", is_deleted=False
    ),
}


@pytest.fixture
def as_nobody(client: TestClient, tmp_path: Path) -> Iterator[None]:
    """Within: not root, for whom every folder has permission."""
    if os.geteuid() != 0:
        yield
        return
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and len(folder.parts) > 2:
            folder.chmod(0o755)
    os.chown(tmp_path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def hidden_again(cache: Path) -> Iterator[None]:
    yield
    subprocess.run(["chmod", "-R", "u+rwx", cache.parent], check=True)


@pytest.mark.usefixtures("hidden_again", "as_nobody")
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_entry_is_a_line_and_no_other_models_error(
    client: TestClient, cache: Path, begun: list[Download], bad: Bad
) -> None:
    put(cache, WHOLE)
    folder = put(cache, WHOLE, repo="acme/bad")
    bad.plant(folder)
    models = {one["model"]["hf_repo"]: one for one in client.get(f"{MODELS}/list").json()["models"]}
    assert models[REPO]["status"] == "DOWNLOADED"
    line = models["acme/bad"]
    assert (line["model"]["hf_commit"], line["status"]) == (bad.commit, "PARTIAL")
    assert bad.why in line["error_message"]
    assert client.get(f"{MODELS}/space").json()["cache_size_gb"] > 0
    for commit in (None, COMMIT):
        good = {"hf_repo": REPO, "hf_commit": commit}
        assert client.post(f"{MODELS}/status", json=good).json()["status"] == "DOWNLOADED"
        answer = client.post(f"{MODELS}/download", json=good)
        assert (answer.status_code, answer.json()["status"]) == (202, "DOWNLOADED")
        found = client.post(
            f"{MODELS}/status", json={"hf_repo": "acme/bad", "hf_commit": commit}
        ).json()
        assert found["status"] == "PARTIAL"
        assert bad.why in found["error_message"]
    answer = client.post(f"{MODELS}/download", json={"hf_repo": "acme/bad"})
    assert (answer.json()["status"], len(begun)) == ("DOWNLOADING", 1)
    client.request("DELETE", MODELS, json={"hf_repo": "acme/bad"})
    answer = client.request("DELETE", MODELS, json={"hf_repo": "acme/bad"})
    if bad.is_deleted:
        assert answer.json()["status"] == "deleted"
        assert not os.path.lexists(folder)
    else:
        assert answer.status_code == 409
        assert "Permission denied" in answer.json()["detail"]
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).json()["status"] == "deleted"


@pytest.mark.usefixtures("hidden_again", "as_nobody")
@pytest.mark.parametrize("commit", [None, COMMIT, "c" * 40])
def test_a_model_in_a_cache_for_reading_is_not_called_deleted(
    client: TestClient, cache: Path, commit: str | None
) -> None:
    folder = put(cache, WHOLE)
    put(cache, WHOLE, commit="c" * 40)
    for place in sorted(cache.rglob("*")):
        if place.is_dir():
            place.chmod(0o555)
    cache.chmod(0o555)
    model = {"hf_repo": REPO, "hf_commit": commit}
    answer = client.request("DELETE", MODELS, json=model)
    assert answer.status_code == 409
    assert f"{REPO} could not be deleted completely: {folder}" in answer.json()["detail"]
    assert client.post(f"{MODELS}/status", json=model).json()["status"] == "DOWNLOADED"


@pytest.mark.usefixtures("hidden_again", "as_nobody")
def test_a_cache_that_cannot_be_read_is_said(client: TestClient, cache: Path) -> None:
    put(cache, WHOLE)
    cache.chmod(0)
    for path in ("list", "space"):
        answer = client.get(f"{MODELS}/{path}")
        assert answer.status_code == 503
        assert f"The cache {cache} cannot be read: Permission denied" in answer.json()["detail"]


def test_what_another_revision_shares_is_not_deleted(client: TestClient, cache: Path) -> None:
    folder = put(cache, WHOLE)
    shared = folder / "snapshots" / ("c" * 40)
    shared.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (shared / name).symlink_to(folder / "blobs" / f"aaaa-{name}")
    (shared / "own.py").symlink_to(folder / "blobs" / "own")
    (folder / "blobs" / "own").write_text("x")
    outside = cache.parent / "outside"
    outside.write_text("x")
    (shared / "outside.py").symlink_to(outside)
    model = {"hf_repo": REPO, "hf_commit": "c" * 40}
    assert client.request("DELETE", MODELS, json=model).json()["status"] == "deleted"
    assert not shared.exists()
    assert not (folder / "blobs" / "own").exists()
    assert outside.exists()
    assert client.post(f"{MODELS}/status", json={"hf_repo": REPO}).json()["status"] == "DOWNLOADED"


def test_folders_of_any_name_are_listed(client: TestClient, cache: Path) -> None:
    put(cache, WHOLE, repo="a/b/c")
    (cache / "datasets--acme--data" / "snapshots").mkdir(parents=True)
    (cache / ".locks").mkdir()
    (cache / "version.txt").touch()
    (begun := cache / "models--acme--begun" / "blobs").mkdir(parents=True)
    (begun / "x.incomplete").touch()
    os.makedirs(os.fsencode(cache) + b"/models--no--text\xff/snapshots/\xff")
    os.mkfifo(cache / "models--a--b--c" / "refs" / "pipe")
    models = client.get(f"{MODELS}/list").json()["models"]
    assert [(*one["model"].values(), one["status"]) for one in models] == [
        ("a/b/c", COMMIT, "DOWNLOADED"),
        ("acme/begun", None, "PARTIAL"),
        ("no/text\\udcff", "\\udcff", "PARTIAL"),
    ]


def test_offline_a_download_says_at_once_what_is_here(
    client: TestClient, cache: Path, begun: list[Download], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, WHOLE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    answer = client.post(f"{MODELS}/download", json={"hf_repo": REPO, "hf_commit": "b" * 40})
    assert (answer.status_code, begun) == (409, [])
    assert f"HF_HUB_OFFLINE forbids to ask the hub for {REPO}" in answer.json()["detail"]
    assert f"{cache} has its revisions {COMMIT} (main)" in answer.json()["detail"]


def test_list_and_space(client: TestClient, cache: Path) -> None:
    put(cache, WHOLE)
    put(cache, {"config.json": "{}"}, repo="acme/half")
    models = client.get(f"{MODELS}/list").json()["models"]
    assert [(one["model"]["hf_repo"], one["status"]) for one in models] == [
        *(("acme/half", "PARTIAL"), (REPO, "DOWNLOADED"))
    ]
    space = client.get(f"{MODELS}/space").json()
    assert space["cache_size_gb"] > 0
    assert space["available_gb"] > 0
    assert space["cache_path"] == str(cache)


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
