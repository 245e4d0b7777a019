"""What the Celery tasks of this process work with: one runner of jobs and one of rounds per
worker process.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.jobs import JobRunner
from workers.rounds import RoundRunner


@dataclass(frozen=True)
class Runtime:
    jobs: JobRunner
    rounds: RoundRunner


_current: Runtime | None = None


def install(runtime: Runtime) -> None:
    """To be called before Celery starts consuming."""
    global _current
    _current = runtime


def current() -> Runtime:
    """RuntimeError outside a worker."""
    if _current is None:
        raise RuntimeError("no engine is loaded in this process; start it with `proofline worker`")
    return _current
