"""What a download fetches, and what it says where it cannot."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from api.models.cache import ModelCache
from api.models.download import fetch
from poc_core.state.downloads import Download
from tests.harness.samples import known
from tests.peers.hub import COMMIT, REPO, Hub

HubWith = Callable[[Mapping[str, bytes]], Hub]
OBJECTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SMALL = {
    **dict.fromkeys(OBJECTS, b"{}"),
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ x }}",
    "modeling_small.py": b"x = 1",
    "code/parts.py": b"y = 2",
}
IDLE = {
    "README.md": b"# small",
    ".gitattributes": b"*",
    "figure.png": b"png",
    "onnx/model.onnx": b"o" * 100,
    "onnx/config.json": b"{}",
    "original/consolidated.00.pth": b"p" * 100,
    "training_args.bin": b"t",
    "optimizer.pt": b"t",
    "tf_model.h5": b"h" * 100,
    "flax_model.msgpack": b"m" * 100,
    "model-q4.gguf": b"g" * 100,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": dict(enumerate(SHARDS))}).encode()
SHARDED = {"model.safetensors.index.json": INDEX, **dict.fromkeys(SHARDS, b"s" * 100)}
TORCH = {"pytorch_model.bin": b"b" * 100, "pytorch_model.bin.index.json": b'{"weight_map": {}}'}
MISTRAL = {"consolidated.safetensors": b"c" * 100}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return ModelCache(tmp_path / "hub")


@pytest.fixture
def hub_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, bytes]], Hub]]:
    running: list[Hub] = []

    def start(files: Mapping[str, bytes]) -> Hub:
        hub = Hub(files=files).__enter__()
        running.append(hub)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return hub

    yield start
    for hub in running:
        hub.__exit__()


def a_download(commit: str | None = None) -> Download:
    return Download("task", REPO, commit, "m", 0.0)


def here(cache: ModelCache) -> set[str]:
    folder = cache.folder(REPO) / "snapshots" / COMMIT
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("weights", "loaded"),
    [
        ({"model.safetensors": b"w", **TORCH}, {"model.safetensors"}),
        ({**SHARDED, **TORCH, **MISTRAL}, {*SHARDED}),
        ({**SHARDED, "model.safetensors": b"w" * 100}, {*SHARDED}),
        ({**SHARDED, **MISTRAL, "params.json": b"{}"}, {*MISTRAL, "params.json"}),
        ({"pytorch_model.bin": b"b"}, {"pytorch_model.bin"}),
        ({"weights.pt": b"b"}, {"weights.pt"}),
    ],
    ids=["safetensors", "shards", "as the index says", "Mistral's", "torch's", "quantized"],
)
@pytest.mark.parametrize("commit", [None, COMMIT])
def test_what_the_engine_loads_comes_and_nothing_else(
    cache: ModelCache,
    hub_with: HubWith,
    weights: dict[str, bytes],
    loaded: set[str],
    commit: str | None,
) -> None:
    hub_with(IDLE | SMALL | weights)
    assert fetch(a_download(commit)) is None
    assert here(cache) == {*SMALL, *loaded}
    assert cache.stage(REPO, commit) == "DOWNLOADED"


@pytest.mark.parametrize(
    ("name", "left"),
    [
        *itertools.product(
            ["config.json", "tokenizer.json", *SHARDED], [None, b"", b"{", b"[]" * 60]
        ),
        ("config.json", b"{{"),  # of the right size, and no JSON
    ],
)
def test_what_lacks_or_is_broken_is_completed(
    cache: ModelCache, hub_with: HubWith, name: str, left: bytes | None
) -> None:
    files = SMALL | SHARDED
    hub_with(files)
    assert fetch(a_download()) is None
    path = cache.folder(REPO) / "snapshots" / COMMIT / name
    if left is None:
        path.resolve().unlink()
    else:
        path.resolve().write_bytes(left)
    assert fetch(a_download()) is None
    assert path.read_bytes() == files[name]
    assert cache.stage(REPO, None) == "DOWNLOADED"


def test_a_repository_without_a_part_fails_and_says_which(
    cache: ModelCache, hub_with: HubWith
) -> None:
    hub_with({"config.json": b"{}", **SHARDED, SHARDS[1]: b""})
    error = known(fetch(a_download()))
    assert f"The hub's {REPO} at {COMMIT} has no {SHARDS[1]}, a tokenizer" in error


def test_room_is_checked_before_anything_comes(
    cache: ModelCache,
    hub_with: HubWith,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = hub_with(SMALL | {"model.safetensors": b"w" * 10**6})
    usage = shutil.disk_usage(cache.path.parent)
    left = SimpleNamespace(total=usage.total, used=usage.used, free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: left)
    error = known(fetch(a_download()))
    assert f"{cache.path} has 0.0 GB free: delete another model" in error
    assert not any("safetensors" in path for path in hub.asked)
    left.free += 1000
    assert fetch(a_download()) is None
    left.free = 0
    assert fetch(a_download()) is None  # it is here


def test_out_of_reach_it_says_what_is_here(cache: ModelCache, hub_with: HubWith) -> None:
    hub = hub_with(SMALL | SHARDED)
    assert fetch(a_download()) is None
    hub.__exit__()
    error = known(fetch(a_download("b" * 40)))
    assert f"{cache.path} has its revisions {COMMIT} (main)" in error
