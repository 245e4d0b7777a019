"""An unreadable cache entry is one line of the list and affects no other model."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api.models.cache import ModelCache
from poc_core.state.downloads import Download
from tests.harness.model_cache import COMMIT, MODELS, REPO, WHOLE, put


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
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache outside of pytest's folders, which only their owner may enter."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(ModelCache, "path", Path(folder) / "hub")
        yield Path(folder) / "hub"
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=True)


@pytest.fixture
def as_nobody(client: TestClient, cache: Path, begun: list[Download]) -> Iterator[None]:
    """Within: not root, for whom every folder has permission."""
    if os.geteuid() != 0:
        yield
        return
    # Reads what requests read at first: nobody cannot read a clone in root's home.
    put(cache, WHOLE)
    client.get(f"{MODELS}/list")
    client.post(f"{MODELS}/download", json={"hf_repo": "acme/none"})
    for repo in ("acme/none", REPO):
        client.request("DELETE", MODELS, json={"hf_repo": repo})
    begun.clear()
    shutil.rmtree(cache)
    os.chown(cache.parent, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.usefixtures("as_nobody")
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


@pytest.mark.usefixtures("as_nobody")
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


@pytest.mark.usefixtures("as_nobody")
def test_a_cache_that_cannot_be_read_is_said(client: TestClient, cache: Path) -> None:
    put(cache, WHOLE)
    cache.chmod(0)
    for path in ("list", "space"):
        answer = client.get(f"{MODELS}/{path}")
        assert answer.status_code == 503
        assert f"The cache {cache} cannot be read: Permission denied" in answer.json()["detail"]
