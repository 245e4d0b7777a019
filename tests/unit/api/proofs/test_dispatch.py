"""What the producer puts on the queues."""

from collections.abc import Iterator

import pytest
from kombu import Connection

from api.proofs.dispatch import Dispatcher
from poc_core.queues import WORK_TASK, model_queue, worker_queue
from poc_core.settings import Settings


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    """One whose broker is in this process."""
    made = Dispatcher(Settings())
    made._celery.conf.update(broker_url="memory://", broker_transport_options={})
    yield made
    made.close()


def messages(queue: str, n: int) -> list[tuple[str, list[object]]]:
    """The (task, args) of n messages of a queue, waiting a little for each."""
    broker = Connection("memory://", transport_options={"polling_interval": 0.01})
    with broker as connection, connection.SimpleQueue(queue) as simple:
        taken = [simple.get(timeout=60) for _ in range(n)]
        assert simple.qsize() == 0
    return [(message.headers["task"], message.payload[0]) for message in taken]


def test_as_many_messages_are_sent_as_workers_are_to_wake(dispatcher: Dispatcher) -> None:
    dispatcher.wake("model-a", 3)
    assert messages(model_queue("model-a"), 3) == [(WORK_TASK, ["model-a"])] * 3


def test_each_named_worker_gets_a_message_of_its_own(dispatcher: Dispatcher) -> None:
    dispatcher.wake_each("model-a", ["w1", "w2"])
    for worker_id in ("w1", "w2"):
        assert messages(worker_queue(worker_id), 1) == [(WORK_TASK, ["model-a"])]


def test_a_broker_that_is_away_is_no_error_and_is_asked_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = Dispatcher(Settings(redis_url="redis://127.0.0.1:1/0"))
    dispatcher.wake("model-c", 200)
    dispatcher.close()
    told = "work of model-c is stored, but its workers were not woken"
    assert caplog.text.count(told) == 1
