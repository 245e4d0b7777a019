"""What happened to workers between two looks."""

from typing import Any

from cli.supervise.follower import happenings
from poc_core.serving.places import WorkerPlace

READY = WorkerPlace(name="h/gpu0", pid=1, is_ready=True, since=100.0)
KILLED: dict[str, Any] = {"last_exit": "killed by SIGKILL", "last_exit_at": 200.0}


def texts(before: list[WorkerPlace], now: list[WorkerPlace]) -> list[str]:
    return [text for _, text in happenings(before, now)]


def changed(place: WorkerPlace, **changes: Any) -> WorkerPlace:
    return place.model_copy(update=changes)


def test_a_worker_that_stays_as_it_was_has_nothing_to_tell() -> None:
    assert texts([READY], [READY]) == []
    loading = changed(READY, is_ready=False)
    assert texts([], [loading]) == texts([loading], [loading]) == []


def test_the_first_start_is_told_when_it_is_ready() -> None:
    assert texts([changed(READY, is_ready=False)], [READY]) == ["h/gpu0 is ready."]


def test_an_end_and_the_return_are_told() -> None:
    ended = changed(READY, pid=None, is_ready=False, **KILLED)
    back = changed(ended, pid=2, is_ready=True, since=212.0)
    assert texts([READY], [ended]) == ["h/gpu0 ended (killed by SIGKILL); it is started again."]
    assert texts([ended], [back]) == ["h/gpu0 is ready again, 12 s after its end."]


def test_what_happened_between_two_looks_is_told_whole() -> None:
    back = changed(READY, pid=2, since=201.0, **KILLED)
    assert texts([READY], [back]) == [
        "h/gpu0 ended (killed by SIGKILL); it is started again.",
        "h/gpu0 is ready again, 1 s after its end.",
    ]


def test_a_worker_that_is_given_up_says_why() -> None:
    given_up = changed(
        READY, pid=None, is_ready=False, gave_up="h/gpu0 ended; not restarted", **KILLED
    )
    assert texts([READY], [given_up]) == ["h/gpu0 ended; not restarted"]
