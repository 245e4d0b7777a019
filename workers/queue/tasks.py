"""The Celery tasks of a worker. They carry no data of a job or round, only where it is: the
truth is in Redis.
"""

from celery import shared_task

from poc_core.queues import ROUND_STEP_TASK, RUN_BATCH_TASK
from workers.queue import runtime


@shared_task(name=RUN_BATCH_TASK)
def run_batch(job_id: str, batch_index: int) -> None:
    """Compute one batch of nonces of a job. Running it twice, late or for an ended job changes
    nothing.
    """
    runtime.current().jobs.run_batch(job_id, batch_index)


@shared_task(name=ROUND_STEP_TASK)
def round_step(round_id: str) -> None:
    """Compute some seconds for a round, then queue the next step. A second one beside it does
    nothing.
    """
    runtime.current().rounds.step(round_id)
