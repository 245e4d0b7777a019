"""The Celery task of a worker. Its message only wakes the worker; the work itself is in Redis."""

from celery import shared_task

from poc_core import queues
from workers.work import Turns

_turns: Turns | None = None


def install(turns: Turns) -> None:
    """Sets the Turns object that the task `work` uses. Must be called before Celery consumes."""
    global _turns
    _turns = turns


@shared_task(name=queues.WORK_TASK)
def work(*_: object) -> str:
    """Computes for some seconds. Returns a text about the computed nonces, which Flower shows."""
    if _turns is None:
        raise RuntimeError("no engine is loaded in this process; start it with `proofline worker`")
    return _turns.take()


for _earlier in queues.EARLIER_TASKS:
    shared_task(name=_earlier)(work.run)
