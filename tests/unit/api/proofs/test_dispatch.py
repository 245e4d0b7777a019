"""What the producer puts on the queues."""

from collections.abc import Iterator

import pytest
from kombu import Connection

from api.proofs import dispatch
from api.proofs.dispatch import Dispatcher
from poc_core.queues import RUN_BATCH_TASK, model_queue
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


def test_every_batch_has_one_message_on_its_models_queue(dispatcher: Dispatcher) -> None:
    dispatcher.publish("model-a", "job", 3)
    assert messages(model_queue("model-a"), 3) == [
        (RUN_BATCH_TASK, ["job", index]) for index in range(3)
    ]


def test_a_large_job_is_published_to_its_end_in_the_background(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_AT_ONCE", 4)
    monkeypatch.setattr(dispatch, "_TURN", 3)
    dispatcher.publish("model-b", "job", 12)
    assert [args[1] for _, args in messages(model_queue("model-b"), 12)] == list(range(12))


def test_a_job_that_was_stopped_is_published_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_AT_ONCE", 8)
    monkeypatch.setattr(dispatch, "_LOOK", 4)
    looks: list[str] = []

    def is_wanted(job_id: str) -> bool:
        looks.append(job_id)
        return len(looks) < 2

    dispatcher = Dispatcher(Settings(), is_wanted)
    dispatcher._celery.conf.update(broker_url="memory://", broker_transport_options={})
    dispatcher.publish("model-d", "job", 100)
    dispatcher._background.shutdown()
    dispatcher.close()
    assert looks == ["job", "job"]
    assert [args[1] for _, args in messages(model_queue("model-d"), 8)] == list(range(8))


def test_a_broker_that_is_away_is_no_error_and_is_asked_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = Dispatcher(Settings(redis_url="redis://127.0.0.1:1/0"))
    dispatcher.publish("model-c", "the-job", 10_000)
    dispatcher.close()
    told = "job the-job is stored, but not all its batches were published"
    assert caplog.text.count(told) == 1
