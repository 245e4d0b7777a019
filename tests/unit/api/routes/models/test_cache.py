"""The API lists and deletes models in the Hugging Face cache."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from fastapi.testclient import TestClient

from api.models.cache import CacheError, ModelCache
from tests.harness.model_cache import COMMIT, MODELS, REPO, TOKENIZED, WHOLE, put
from tests.harness.waiting import wait_until

SHARDS = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
LONG = json.dumps({"weight_map": {"a": "x" * 300}})
BOTH = {"model-1.safetensors": "x", "model-2.safetensors": "y"}


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


def test_a_model_that_is_served_is_not_deleted(
    client: TestClient, cache: Path, serve: Callable[..., Any]
) -> None:
    put(cache, WHOLE)
    serve("w1", model=REPO)
    assert client.request("DELETE", MODELS, json={"hf_repo": REPO}).status_code == 409


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


def test_a_disk_that_hangs_holds_no_other_route(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    asked: list[int] = []

    def hang(_: ModelCache) -> None:
        asked.append(1)
        goes_on.wait(120)
        raise CacheError("The cache cannot be read.")

    def have_few_threads() -> None:
        to_thread.current_default_thread_limiter().total_tokens = 4

    monkeypatch.setattr(ModelCache, "space", hang)
    assert client.portal is not None
    client.portal.call(have_few_threads)
    with ThreadPoolExecutor() as threads:
        hung = [threads.submit(client.get, f"{MODELS}/space") for _ in range(4)]
        try:
            wait_until(lambda: len(asked) == 4, "the requests")
            assert threads.submit(client.get, "/api/v1/state").result(60).status_code == 200
        finally:
            goes_on.set()
        assert {one.result(60).status_code for one in hung} == {503}
