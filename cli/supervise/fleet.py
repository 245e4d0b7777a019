"""Runs this machine's workers: a supervised process for each engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cli.supervise import processes
from cli.supervise.start_stages import StartStages
from poc_core.errors import ProoflineError
from poc_core.serving import places
from poc_core.serving.deployments import ChildLog
from workers.engines.options import EngineOptions
from workers.vllm.start import log_patterns

WORKER_GRACE_S = 30.0  # to finish the running batch and end the engine
# Secrets that workers do not need.
NOT_FOR_WORKERS = ("POC_API_KEY", "FLOWER_BASIC_AUTH")
FAILED_STARTS = 1  # of a model deployed by request; the second failure is reported
ERROR_TAIL_LINES = 12  # last lines of a failed child's log in the error text
ERROR_CAUSES = 5  # most earlier lines that look like a cause

# Lines of each worker's log that the node's console displays.
TOLD_LINES = 20
TOLD_LINE_CHARS = 300


def worker_command(options: EngineOptions) -> list[str]:
    """Returns the command line that runs a worker under a supervisor, with these engine options."""
    return processes.command_of_proofline("supervised-worker", options.model_dump_json())


class WorkersError(ProoflineError):
    """No worker is restarted any more, because all workers have failed too often."""


@dataclass
class Fleet:
    """This machine's supervised workers, named host1/gpu0-1 or host1/cpu0. Cannot be restarted."""

    host: str
    command: Callable[[], list[str]]
    environments: Sequence[Mapping[str, str]]
    max_fast_crashes: int
    on_line: processes.LineSink
    announce: Callable[[str], None]
    own: bool = True  # False for a model deployed by request

    def __post_init__(self) -> None:
        self.children: list[processes.Child] = []
        # Arguments that the workers' vLLM does not know, according to the workers' logs.
        self.left_out: list[str] = []
        self.stages = StartStages(len(self.environments), self.announce)

    def start(self, env: Mapping[str, str]) -> None:
        """Starts the workers. `env`: variables for all, such as the Redis url with its password.

        If one worker cannot be started, kills the others and raises the error.
        """
        try:
            self._start(env)
        except BaseException:
            self.kill()
            raise

    def _start(self, env: Mapping[str, str]) -> None:
        for own, slot in zip(self.environments, slots(self.environments), strict=True):
            spec = processes.ChildSpec(
                f"{self.host}/{slot}",
                self.command(),
                env=processes.environment_of_proofline(
                    {**own, **env, places.SLOT_VARIABLE: slot}, NOT_FOR_WORKERS
                ),
                grace_s=WORKER_GRACE_S,
                max_fast_crashes=self.max_fast_crashes,
                max_failed_starts=None if self.own else FAILED_STARTS,
                ready_line=log_patterns.READY,
                telling=log_patterns.TELLING,
                hopeless=log_patterns.why_hopeless,
            )
            child = processes.Child(spec, self._hear, self.announce)
            self.children.append(child)
            child.start()

    def _hear(self, name: str, line: str) -> None:
        found = log_patterns.LEFT_OUT.search(line)
        if found and found[1] not in self.left_out:
            self.left_out.append(found[1])
        self.on_line(name, line)
        self.stages.hear(name, line)
        if log_patterns.READY.search(line):
            self.stages.ready(name)

    def stop(self) -> None:
        """Lets all workers finish their running work, and waits until the workers have ended."""
        for child in self.children:
            child.request_stop()
        for child in self.children:
            child.wait_stopped()

    def kill(self) -> None:
        """Kills all workers with SIGKILL, so that a running `stop` returns soon. Does not wait."""
        for child in self.children:
            child.kill()

    @property
    def n_ready(self) -> int:
        return sum(child.is_ready for child in self.children)

    @property
    def means(self) -> str:
        """A text with the number of workers, their GPUs, and the speed in their self-tests."""
        gpus = [place.get("CUDA_VISIBLE_DEVICES") for place in self.environments]
        where = f"GPU {' and '.join(filter(None, gpus))}" if any(gpus) else "the CPU"
        speed = self.stages.speed
        n = len(self.environments)
        return f"{n} worker{'s' * (n != 1)} on {where}{', ' if speed else ''}{speed}"

    def logs(self) -> list[ChildLog]:
        return [
            ChildLog(
                name=child.spec.name,
                pid=child.pid,
                lines=[line[:TOLD_LINE_CHARS] for line in child.tail[-TOLD_LINES:]],
            )
            for child in self.children
        ]

    def places(self) -> list[places.WorkerPlace]:
        return [
            places.WorkerPlace(
                name=child.spec.name,
                pid=child.pid,
                is_ready=child.is_ready,
                gave_up=child.gave_up,
                since=child.since,
                restarts=child.restarts,
                restarts_lately=child.restarts_within(places.LATELY_S),
                last_exit=child.last_exit,
                last_exit_at=child.last_exit_at,
            )
            for child in self.children
        ]

    @property
    def is_serving(self) -> bool:
        """True once all workers that are not given up have been ready. False if none is left."""
        kept = [child for child in self.children if child.gave_up is None]
        return bool(kept) and all(child.was_ready for child in kept)

    def reason(self) -> str | None:
        """Returns one line that says why all workers have failed; None unless all have failed."""
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
        """Returns why no worker is left, with the end of a log; None while a worker is left."""
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
    """Returns each worker's name on this machine: by its GPUs (gpu0-1) or number (cpu0)."""
    return [
        places.slot_of(own.get("CUDA_VISIBLE_DEVICES", ""), f"cpu{index}")
        for index, own in enumerate(environments)
    ]


def with_tail(message: str, child: processes.Child) -> str:
    shown = "".join(f"\n  {child.spec.name} | {line}" for line in telling_lines(child.tail))
    return f"{message} The end of its log:{shown}" if shown else message


def telling_lines(log: Sequence[str]) -> list[str]:
    """Returns a log's last lines and, before them, earlier error lines that may name the cause."""
    earlier, end = log[:-ERROR_TAIL_LINES], list(log[-ERROR_TAIL_LINES:])
    causes = list(dict.fromkeys(line for line in earlier if log_patterns.ERROR.search(line)))[
        -ERROR_CAUSES:
    ]
    return [*causes, "...", *end] if causes else end
