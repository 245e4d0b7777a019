"""Downloads of models by processes of their own, from a hub on loopback."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from api.models.cache import ModelCache
from api.models.downloads import Downloads
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.downloads import MOST_AT_A_TIME, Download, DownloadStore
from tests.harness.samples import known
from tests.harness.waiting import wait_until
from tests.integration.node import Node
from tests.integration.processes import frozen
from tests.peers.hub import COMMIT, REPO, Hub

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("node")]

# Not this host: the node's own API would tend what is its own.
MACHINE = "a-machine-of-this-test"


@pytest.fixture
def store(node: Node, redis_of: Callable[[Node], Redis]) -> DownloadStore:
    return DownloadStore(redis_of(node))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return ModelCache(tmp_path / "hub")


@pytest.fixture
def api(node: Node, store: DownloadStore, cache: ModelCache) -> Iterator[Callable[[], Downloads]]:
    """What an API has, which then may be replaced by its successor."""
    made: list[Downloads] = []

    def start() -> Downloads:
        downloads = Downloads(store, Settings(redis_url=str(node.stack.redis_url)))
        downloads.machine = MACHINE
        made.append(downloads)
        return downloads

    yield start
    for downloads in made:
        downloads.close()
    for download in store.running():
        store.forget(download.hf_repo, download.hf_commit)


def begin(store: DownloadStore, downloads: Downloads) -> Download:
    download = store.start(REPO, None, MACHINE)
    assert isinstance(download, Download)
    downloads.begin(download)
    return download


def until_the_weights_are_asked_for(hub: Hub) -> None:
    wait_until(
        lambda: any(path.endswith(".safetensors") for path in hub.asked), "the weights asked for"
    )


def ended(store: DownloadStore) -> Download | None:
    found = store.read(REPO, None)
    return found if found is not None and found.state != "running" else None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_a_model_comes_whole(store: DownloadStore, api: Any, cache: ModelCache, hub: Hub) -> None:
    begin(store, api())
    wait_until(lambda: ended(store), "the end of the download", 300)
    found = known(store.read(REPO, None))
    assert (found.state, found.error) == ("done", None)
    assert list(cache.models()) == [(REPO, COMMIT, "DOWNLOADED")]


def test_a_model_that_there_is_not_fails_and_says_why(
    store: DownloadStore, api: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = store.start("acme/nothing", None, MACHINE)
    assert isinstance(download, Download)
    api().begin(download)
    wait_until(lambda: store.running() == [], "the end of the download", 300)
    found = known(store.read("acme/nothing", None))
    assert found.state == "failed"
    assert found.error


def test_it_goes_on_after_the_apis_restart_and_after_its_own_death(
    node: Node,
    store: DownloadStore,
    api: Any,
    cache: ModelCache,
    hub: Hub,
    redis_of: Callable[[Node], Redis],
) -> None:
    hub.delay_s = 60.0
    first = api()
    download = begin(store, first)
    until_the_weights_are_asked_for(hub)
    (process,) = first.processes()
    successor = api()
    successor.tend()
    assert successor.processes() == []  # one is at it
    process.kill()
    process.wait(60)
    redis_of(node).delete(keys.download(download.task_id))  # as after its 15 s
    hub.delay_s = 0.0
    successor.tend()
    assert len(successor.processes()) == 1
    wait_until(lambda: ended(store), "the end of the download", 300)
    assert cache.stage(REPO, None) == "DOWNLOADED"


def test_one_that_is_cancelled_ends(
    store: DownloadStore, api: Any, cache: ModelCache, hub: Hub
) -> None:
    hub.delay_s = 60.0
    downloads = api()
    begin(store, downloads)
    until_the_weights_are_asked_for(hub)
    (process,) = downloads.processes()
    assert cache.stage(REPO, None) in ("PARTIAL", "NOT_FOUND")
    assert store.forget(REPO, None)
    assert process.wait(60) == 0


def test_one_that_is_cancelled_and_begun_again_is_not_ended_by_the_first_process(
    store: DownloadStore, api: Any, cache: ModelCache, hub: Hub
) -> None:
    hub.delay_s = 60.0
    downloads = api()
    begin(store, downloads)
    until_the_weights_are_asked_for(hub)
    (process,) = downloads.processes()
    assert store.forget(REPO, None)
    hub.delay_s = 0.0
    again = begin(store, downloads)
    assert process.wait(60) == 0
    wait_until(lambda: ended(store), "the end of the download", 300)
    assert (found := store.read(REPO, None)) is not None
    assert (found.task_id, found.state) == (again.task_id, "done")
    assert cache.stage(REPO, None) == "DOWNLOADED"


def test_downloads_begun_and_cancelled_in_a_loop_have_three_processes_at_most(
    store: DownloadStore, api: Any, cache: ModelCache, hub: Hub
) -> None:
    hub.delay_s = 60.0
    downloads = api()
    with ExitStack() as standing:  # so that none has ended before the last is begun
        for _ in range(30):
            if isinstance(started := store.start(REPO, None, MACHINE), Download):
                downloads.begin(started)
                standing.enter_context(frozen(downloads.processes()[-1].pid))
            store.forget(REPO, None)
        processes = downloads.processes()
    assert len(processes) == MOST_AT_A_TIME
    for process in processes:
        assert process.wait(60) == 0
    again = store.start(REPO, None, MACHINE)
    assert isinstance(again, Download)  # each gave its slot back when it ended
    store.leave(again.task_id)
