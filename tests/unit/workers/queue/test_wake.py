"""What a worker puts on its own queue, and how messages of all releases reach its turns."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from celery import Celery
from kombu import Queue
from redis import Redis

from poc_core.queues import WORK_TASK, model_queue, worker_queue
from tests.harness.samples import MODEL
from workers import tasks
from workers.queue.app import create_app
from workers.queue.wake import Wake
from workers.work import Turns


@pytest.fixture
def app() -> Iterator[Celery]:
    """Its broker is kombu's own, in this process."""
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.task_queues = [Queue(model_queue(MODEL)), Queue(worker_queue("w1"))]
    yield app
    app.close()


def taken(app: Celery, queue: str) -> list[tuple[str, list[Any]]]:
    """(task, arguments) of each message that waits, which are gone then."""
    found = []
    with app.connection() as connection, connection.SimpleQueue(queue) as waiting:
        while waiting.qsize():
            message = waiting.get()
            found.append((message.headers["task"], message.payload[0]))
            message.ack()
    return found


def test_a_worker_wakes_itself_alone(app: Celery, redis: Redis) -> None:
    Wake(app, redis, MODEL, "w1").myself()
    assert taken(app, worker_queue("w1")) == [(WORK_TASK, [MODEL])]
    assert taken(app, model_queue(MODEL)) == []


def test_a_message_waits_while_it_is_in_its_redis_list(app: Celery, redis: Redis) -> None:
    wake = Wake(app, redis, MODEL, "w1")
    redis.rpush(model_queue(MODEL), "message")
    assert not wake.waits()
    redis.rpush(worker_queue("w1"), "message")
    assert wake.waits()


def test_no_more_messages_are_kept_than_there_are_workers(app: Celery, redis: Redis) -> None:
    wake = Wake(app, redis, MODEL, "w1")
    queue = model_queue(MODEL)
    for n_workers in (0, 1, 2, 3):
        if n_workers:
            redis.zadd("poc:workers", {f"w{n_workers}": 1})
        redis.lpush(queue, *range(10))
        wake.trim()
        assert redis.llen(queue) == max(1, n_workers)
    redis.delete(queue)
    redis.lpush(queue, "message")
    wake.trim()
    assert redis.llen(queue) == 1


@pytest.mark.parametrize(
    ("task", "args"),
    [
        ("proofline.work", [MODEL]),
        ("proofline.run_batch", ["4ef1b5e6a0a84d5aa0f4b1d7f3f4c1aa", 3]),  # release 59's
        ("proofline.round_step", ["4ef1b5e6a0a84d5aa0f4b1d7f3f4c1aa"]),
    ],
)
def test_messages_of_this_and_earlier_releases_wake_a_worker(
    task: str, args: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken:
        def take(self) -> str:
            return "computed"

    monkeypatch.setattr(tasks, "_turns", None)
    tasks.install(cast(Turns, Taken()))
    with create_app("redis://127.0.0.1:1/0") as app:
        app.loader.import_default_modules()
        assert app.tasks[task](*args) == "computed"
