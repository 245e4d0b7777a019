"""Prints a command's progress as lines, for logs such as those of docker, nohup and CI."""

import math
from collections.abc import Callable
from typing import Any

from rich.progress import Progress, TaskID

# Seconds between two lines.
_EVERY_S = 10.0


class ProgressLines(Progress):
    """A progress display for logs: a line at a task's start and end, and every 10 s."""

    def __init__(
        self, unit: str, tell: Callable[[str], None], get_time: Callable[[], float] | None = None
    ) -> None:
        """`unit`: what the progress counts, such as "nonces". `tell`: prints a line."""
        super().__init__(disable=True, get_time=get_time)
        self._unit = unit
        self._tell = tell
        self._said_at = -math.inf
        self._ended: set[TaskID] = set()

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        task_id = super().add_task(description, *args, **options)
        self._say(task_id)
        return task_id

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: TaskID, **options: Any) -> None:
        super().update(task_id, **options)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        task, now = self._tasks[task_id], self.get_time()
        if task_id in self._ended or not (task.finished or now >= self._said_at + _EVERY_S):
            return
        self._said_at = now
        if task.finished:
            self._ended.add(task_id)
        total = "" if task.total is None else f" of {task.total:,.0f}"
        left = None if task.finished else task.time_remaining
        rest = "" if left is None else f", about {left:.0f} s to go"
        text = (
            f"{task.description}: {task.completed:,.0f}{total} {self._unit} in"
            f" {task.elapsed or 0:.0f} s{rest}"
        )
        self._tell(text)
