"""Downloads of models in Redis: who has one, how it ends, and how many there may be."""

from typing import Any

import pytest
from redis import Redis

from poc_core.state import keys
from poc_core.state.downloads import MOST_AT_A_TIME, Download, DownloadStore
from tests.harness.samples import Clock

REPO = "acme/small"


@pytest.fixture
def store(redis: Redis, clock: Clock) -> DownloadStore:
    return DownloadStore(redis, clock)


def start(store: DownloadStore, repo: str = REPO) -> Download:
    started = store.start(repo, None, "here")
    assert isinstance(started, Download)
    return started


def test_a_download_is_kept_for_a_week(store: DownloadStore, redis: Redis) -> None:
    started = start(store)
    for _ in range(2):
        assert max(int(redis.ttl(key)) for key in redis.scan_iter("*")) == 7 * 24 * 3600
        store.end(started)


def test_a_download_that_ended_tells_how(store: DownloadStore) -> None:
    assert store.end(start(store))
    assert store.end(start(store, "acme/other"), "HTTPError: 401")
    found = [store.read(repo, None) for repo in (REPO, "acme/other")]
    assert [(one.state, one.error) for one in found if one] == [
        ("done", None),
        ("failed", "HTTPError: 401"),
    ]
    assert store.running() == []


def test_the_process_of_a_cancelled_download_does_not_end_the_next_of_the_same_model(
    store: DownloadStore,
) -> None:
    cancelled = start(store)
    store.forget(REPO, None)
    again = start(store)
    store.end(cancelled, "OSError: the first's own")
    assert store.running() == [again]
    assert (store.renew(cancelled), store.renew(again)) == (False, True)
    store.end(again)
    store.end(cancelled, "OSError: the first's own")
    assert (found := store.read(REPO, None)) is not None
    assert (found.task_id, found.state, found.error) == (again.task_id, "done", None)


def test_a_cancelled_download_that_ends_is_not_listed_again(store: DownloadStore) -> None:
    cancelled = start(store)
    assert store.forget(REPO, None)
    store.end(cancelled)
    assert (store.read(REPO, None), store.forget(REPO, None)) == (None, False)


def test_one_process_at_a_time_has_a_download(store: DownloadStore) -> None:
    download = start(store)
    assert not store.claim(download)  # who started it is to begin it
    store.leave(download.task_id)
    assert [store.claim(download) for _ in range(2)] == [True, False]


def test_a_cancelled_download_keeps_its_slot_until_its_process_is_gone(
    store: DownloadStore, redis: Redis
) -> None:
    started = [start(store, f"acme/m{n}") for n in range(MOST_AT_A_TIME)]
    for one in started:
        store.forget(one.hf_repo, None)
    assert store.start(REPO, None, "here") == "full"
    store.leave(started[0].task_id)  # its process says that it ends
    again = start(store)
    assert store.start("acme/other", None, "here") == "full"
    redis.delete(keys.download(started[1].task_id))  # as after its time, when it was killed
    start(store, "acme/other")
    store.leave(again.task_id)  # one that is wanted keeps its slot: its next process begins
    assert store.start("acme/third", None, "here") == "full"


def test_of_each_model_one_is_wanted(store: DownloadStore) -> None:
    start(store)
    assert store.start(REPO, None, "here") == "running"
    assert isinstance(store.start(REPO, "a" * 40, "here"), Download)


def test_one_whose_start_is_repeated_because_redis_answer_was_lost_is_no_second(
    store: DownloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    once: Any = store._start  # noqa: SLF001
    monkeypatch.setattr(store, "_start", lambda *args: (once(*args), once(*args))[1])
    started = start(store)
    assert store.running() == [started]


@pytest.mark.parametrize("raw", ["{", "[]", '{"task_id": 1}', "\udcff"], ids=repr)
def test_one_that_cannot_be_read_hides_no_other(
    store: DownloadStore, redis: Redis, raw: str
) -> None:
    other = start(store, "acme/other")
    start(store)
    redis.hset(keys.DOWNLOADS, f"{REPO}@", raw.encode(errors="surrogateescape"))
    assert (store.read(REPO, None), store.running()) == (None, [other])
    assert store.forget(REPO, None)
