"""What a worker puts back on the queues, and how it sees that nothing waits there."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Queue
from redis import Redis

from poc_core.queues import ROUND_STEP_TASK, RUN_BATCH_TASK, model_queue, worker_queue
from tests.harness.samples import MODEL
from workers.queue import job_queue
from workers.queue.job_queue import JobQueue, StepQueue


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


def test_each_batch_is_a_message_to_the_workers_of_its_model(app: Celery, redis: Redis) -> None:
    JobQueue(app, redis, MODEL).publish("job", [2, 5])
    assert taken(app, model_queue(MODEL)) == [
        (RUN_BATCH_TASK, ["job", 2]),
        (RUN_BATCH_TASK, ["job", 5]),
    ]


def test_a_step_is_a_message_to_one_worker_alone(app: Celery, redis: Redis) -> None:
    StepQueue(app, redis, "w1").publish("round")
    assert taken(app, worker_queue("w1")) == [(ROUND_STEP_TASK, ["round"])]
    assert taken(app, model_queue(MODEL)) == []


def test_a_queue_is_empty_until_a_message_waits_in_its_redis_list(
    app: Celery, redis: Redis
) -> None:
    jobs, steps = JobQueue(app, redis, MODEL), StepQueue(app, redis, "w1")
    assert jobs.is_empty()
    assert steps.is_empty()
    redis.rpush(model_queue(MODEL), "message")
    assert (jobs.is_empty(), steps.is_empty()) == (False, True)
    redis.rpush(worker_queue("w1"), "message")
    assert not steps.is_empty()


def test_a_message_is_held_until_it_is_taken(
    app: Celery, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = JobQueue(app, redis, MODEL)
    assert (jobs.newest(), jobs.holds(b"")) == (b"", False)
    for message in ("first", "second"):
        redis.lpush(model_queue(MODEL), message)
    assert (jobs.newest(), jobs.holds(b"first")) == (b"second", True)
    redis.rpop(model_queue(MODEL))
    assert (jobs.holds(b"first"), jobs.holds(b"second")) == (False, True)
    monkeypatch.setattr(job_queue, "_MOST_SEARCHED", 0)
    assert jobs.holds(b"first"), "among so many none is looked for"
