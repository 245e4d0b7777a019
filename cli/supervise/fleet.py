"""The workers of this machine: one supervised process per engine, each with its GPUs or cores."""

from collections.abc import Callable, Mapping, Sequence

from cli.supervise.processes import (
    Child,
    ChildSpec,
    LineSink,
    command_of_proofline,
    environment_of_proofline,
)
from cli.supervise.start_stages import StartStages
from poc_core.errors import ProoflineError
from poc_core.serving.deployments import ChildLog
from poc_core.serving.places import LATELY_S, SLOT_VARIABLE, WorkerPlace, slot_of
from workers.engines.options import EngineOptions
from workers.vllm.start import log_patterns

WORKER_GRACE_S = 30.0  # to finish the running batch and take the engine down
# Secrets of others, which a worker has no use for.
NOT_FOR_WORKERS = ("POC_API_KEY", "FLOWER_BASIC_AUTH")
ERROR_TAIL_LINES = 12  # of a failed child's log, in the error
ERROR_CAUSES = 5  # lines from further up that look like a cause

# Lines of each worker's log that the node's console shows.
TOLD_LINES = 20
TOLD_LINE_CHARS = 300


def worker_command(options: EngineOptions) -> list[str]:
    """The command of one supervised worker."""
    return command_of_proofline("supervised-worker", options.model_dump_json())


class WorkersError(ProoflineError):
    """No worker is left."""


class Fleet:
    """Supervised workers, one for each environment; startable once.

    Each has the name of its place: host1/gpu0-1 by its GPUs or, without one, host1/cpu0.
    """

    def __init__(
        self,
        host: str,
        command: Callable[[], list[str]],
        environments: Sequence[Mapping[str, str]],
        max_fast_crashes: int,
        on_line: LineSink,
        announce: Callable[[str], None],
        max_failed_starts: int | None = None,
    ) -> None:
        self._host = host
        self._max_failed_starts = max_failed_starts
        self._command = command
        self._environments = environments
        self._max_fast_crashes = max_fast_crashes
        self._on_line = on_line
        self._announce = announce
        self.children: list[Child] = []
        # Arguments that the workers' vLLM does not know, by their logs.
        self.left_out: list[str] = []
        self.stages = StartStages(len(environments), announce)

    def start(self, env: Mapping[str, str]) -> None:
        """`env`: for every worker, over its own; the Redis url, say, which no `ps` may show."""
        for own, slot in zip(self._environments, slots(self._environments), strict=True):
            spec = ChildSpec(
                f"{self._host}/{slot}",
                self._command(),
                env=environment_of_proofline({**own, **env, SLOT_VARIABLE: slot}, NOT_FOR_WORKERS),
                grace_s=WORKER_GRACE_S,
                max_fast_crashes=self._max_fast_crashes,
                max_failed_starts=self._max_failed_starts,
                ready_line=log_patterns.READY,
                telling=log_patterns.TELLING,
                hopeless=log_patterns.why_hopeless,
            )
            child = Child(spec, self._hear, self._announce)
            child.start()
            self.children.append(child)

    def _hear(self, name: str, line: str) -> None:
        found = log_patterns.LEFT_OUT.search(line)
        if found and found[1] not in self.left_out:
            self.left_out.append(found[1])
        self._on_line(name, line)
        self.stages.hear(name, line)
        if log_patterns.READY.search(line):
            self.stages.ready(name)

    def stop(self) -> None:
        """Lets all workers finish the work in hand, and waits until they are gone."""
        for child in self.children:
            child.request_stop()
        for child in self.children:
            child.wait_stopped()

    def kill(self) -> None:
        """Hurries a `stop` under way; does not wait."""
        for child in self.children:
            child.kill()

    @property
    def pids(self) -> list[int]:
        """Pids of the workers that run now."""
        return [child.pid for child in self.children if child.pid is not None]

    @property
    def n_ready(self) -> int:
        """Number of workers that take work now."""
        return sum(child.is_ready for child in self.children)

    @property
    def means(self) -> str:
        """How many workers, on which GPUs, and how fast their self-tests saw them."""
        gpus = [place.get("CUDA_VISIBLE_DEVICES") for place in self._environments]
        where = f"GPU {' and '.join(filter(None, gpus))}" if any(gpus) else "the CPU"
        speed = self.stages.speed
        n = len(self._environments)
        return f"{n} worker{'s' * (n != 1)} on {where}{', ' if speed else ''}{speed}"

    def logs(self) -> list[ChildLog]:
        """The last lines of each worker's log."""
        return [
            ChildLog(
                name=child.spec.name,
                pid=child.pid,
                lines=[line[:TOLD_LINE_CHARS] for line in child.tail[-TOLD_LINES:]],
            )
            for child in self.children
        ]

    def places(self) -> list[WorkerPlace]:
        """Each worker as it stands, over its restarts."""
        return [
            WorkerPlace(
                name=child.spec.name,
                pid=child.pid,
                is_ready=child.is_ready,
                gave_up=child.gave_up,
                since=child.since,
                restarts=child.restarts,
                restarts_lately=child.restarts_within(LATELY_S),
                last_exit=child.last_exit,
                last_exit_at=child.last_exit_at,
            )
            for child in self.children
        ]

    @property
    def is_serving(self) -> bool:
        """True if all workers that are not given up have got ready."""
        kept = [child for child in self.children if child.gave_up is None]
        return bool(kept) and all(child.was_ready for child in kept)

    def reason(self) -> str | None:
        """Why no worker is left, in a sentence and the log's end; None while a worker is left."""
        if self.failure() is None:
            return None
        log = self.children[0].tail
        told = next(
            (i for i in reversed(range(len(log))) if log_patterns.TELLING.search(log[i])), len(log)
        )
        # The last error may have several lines.
        return " ".join(
            [f"{self.children[0].gave_up}.", *map(str.strip, log[told : told + ERROR_CAUSES])]
        )

    def failure(self) -> str | None:
        """The error when no worker is left; None while a worker is left."""
        if not self.children or any(child.gave_up is None for child in self.children):
            return None
        last = self.children[-1]
        why = f"No worker is left: {last.gave_up}."
        return (
            why
            if any(text in why for text in log_patterns.HOPELESS.values())
            else with_tail(why, last)
        )


def slots(environments: Sequence[Mapping[str, str]]) -> list[str]:
    """The slot of each worker of a machine, by its GPUs or, without one, its number."""
    return [
        slot_of(own.get("CUDA_VISIBLE_DEVICES", ""), f"cpu{index}")
        for index, own in enumerate(environments)
    ]


def with_tail(message: str, child: Child) -> str:
    """The message, and below it the telling lines of the child's log."""
    shown = "".join(f"\n  {child.spec.name} | {line}" for line in telling_lines(child.tail))
    return f"{message} The end of its log:{shown}" if shown else message


def telling_lines(log: Sequence[str]) -> list[str]:
    """The end of a log, after the errors that led there.

    An engine's process logs the cause of its end long before the traceback of those who waited.
    """
    earlier, end = log[:-ERROR_TAIL_LINES], list(log[-ERROR_TAIL_LINES:])
    causes = list(dict.fromkeys(line for line in earlier if log_patterns.ERROR.search(line)))[
        -ERROR_CAUSES:
    ]
    return [*causes, "...", *end] if causes else end
