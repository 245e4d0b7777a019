"""The Celery tasks of a worker: they carry only where work is, the truth is in Redis."""

from celery import shared_task

from poc_core.queues import ROUND_STEP_TASK, RUN_BATCH_TASK
from workers.jobs import JobBatches
from workers.rounds import RoundSteps

_work: tuple[JobBatches, RoundSteps] | None = None


def install(jobs: JobBatches, rounds: RoundSteps) -> None:
    """Gives this process's tasks what they work with, before Celery starts consuming."""
    global _work
    _work = jobs, rounds


def _installed() -> tuple[JobBatches, RoundSteps]:
    """The two that `install` was given. RuntimeError outside a worker."""
    if _work is None:
        raise RuntimeError("no engine is loaded in this process; start it with `proofline worker`")
    return _work


@shared_task(name=RUN_BATCH_TASK)
def run_batch(job_id: str, batch_index: int) -> None:
    """Computes one batch of a job. Running it twice, late or for an ended job changes nothing."""
    _installed()[0].run_batch(job_id, batch_index)


@shared_task(name=ROUND_STEP_TASK)
def round_step(round_id: str) -> None:
    """Computes some seconds for a round, then queues the next step; a second one does nothing."""
    _installed()[1].step(round_id)
