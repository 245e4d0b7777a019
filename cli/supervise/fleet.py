"""The workers of this machine: one supervised process per engine, each on GPUs or cores of its own.

`proofline up` and `proofline workers` run on it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cli.console import UsageError
from cli.machine import model_memory
from cli.machine.cpu_memory import kv_cache_environment
from cli.machine.gpus import GpuError, groups_of_gpus, pinned_to, visible_gpus, vllm_needs_cuda, vllm_runs_on_cpu
from cli.model_choice import choose_model
from cli.supervise.processes import Child, ChildSpec, LineSink, command_of_proofline, environment_of_proofline
from poc_core.errors import ProoflineError
from workers.vllm import cpu_threads

WORKER_GRACE_S = 30.0  # to finish the running batch and take the engine down
ERROR_TAIL_LINES = 20  # of a failed child's log, in the error
ERROR_CAUSES = 5  # lines from further up that look like a cause
ERROR_LINE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
# What vLLM and torch log when an engine finds too little memory. Another try would end the same.
NO_MEMORY = re.compile(
    r"OutOfMemoryError|No available memory for the cache blocks|is larger than the available KV cache memory"
    r"|is less than (desired|requested memory)|not enough memory"
)
# A model with state beside attention's caches (workers/vllm/kv_isolation.py).
NOT_ISOLATED = re.compile(r"cannot be isolated from chat")
READY = re.compile(r"\S+@\S+ ready\.$")  # Celery's word for a worker that consumes
DOES_NOT_FIT = (
    "the model does not fit: use more --tensor-parallel or --pipeline-parallel, after -- a smaller --max-model-len, or "
    "a smaller model; on a CPU a smaller VLLM_CPU_KVCACHE_SPACE (GiB)"
)
CORRUPTS_CHAT = "proofs would corrupt this model's chat: choose a model that keeps its state in attention's caches only"
HOPELESS = {NO_MEMORY: DOES_NOT_FIT, NOT_ISOLATED: CORRUPTS_CHAT}


@dataclass(frozen=True)
class EngineChoice:
    """What every worker of a fleet runs. UsageError: no such model, or options that do not go together."""

    model: str  # a directory, a shipped model's name, or a name on the hub
    engine: str = "vllm"
    served_model_name: str | None = None
    dtype: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    synthetic_step_ms: float = 50.0
    max_batch_tokens: int | None = None
    vllm_args: Sequence[str] = ()
    path: str = field(init=False)  # what the engine loads
    name: str = field(init=False)  # what clients call it

    def __post_init__(self) -> None:
        path, name = choose_model(self.model, self.served_model_name)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "name", name)
        if self.engine != "vllm" and (self.group_size > 1 or self.vllm_args):
            raise UsageError(f"Parallelism and arguments after -- are vLLM's; the {self.engine} engine takes neither.")

    @property
    def group_size(self) -> int:
        """GPUs (on a CPU: processes) of one engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def wants_gpus(self) -> bool:
        return self.engine != "synthetic" and not (self.engine == "vllm" and vllm_runs_on_cpu())

    def command(self) -> list[str]:
        """The command of one worker."""
        options: dict[str, object] = {
            "model": self.path,
            "served-model-name": self.name,
            "engine": self.engine,
            "dtype": self.dtype,
            "tensor-parallel": self.tensor_parallel,
            "pipeline-parallel": self.pipeline_parallel,
            "synthetic-step-ms": self.synthetic_step_ms,
        }
        if self.max_batch_tokens is not None:
            options["max-batch-tokens"] = self.max_batch_tokens
        flags = [f"--{name}={value}" for name, value in options.items()]
        return command_of_proofline("worker", *flags, "--", *self.vllm_args)

    def groups(self, workers: int) -> list[list[str]]:
        """The GPUs of each of `workers` workers; empty where none are to be pinned. GpuError: there are too few."""
        gpus = visible_gpus() if self.wants_gpus else []
        return groups_of_gpus(gpus, workers, self.group_size) if gpus else []

    def environments(self, groups: Sequence[Sequence[str]], workers: int) -> list[dict[str, str]]:
        """What each worker finds in its environment beside this process's own: its GPUs, or its cores and memory.

        UsageError: the model's weights are larger than the GPUs of one worker, or vLLM needs GPUs and there are none.
        """
        if groups:
            model_memory.check_fits(self.path, self.dtype, groups, self.vllm_args)
            return [pinned_to(group) for group in groups]
        if self.engine != "vllm":
            return [{} for _ in range(workers)]
        if vllm_needs_cuda():
            raise GpuError(
                "The vLLM installed here needs a GPU and this machine shows none: look at nvidia-smi, at "
                "CUDA_VISIBLE_DEVICES and, in a container, at its GPU reservation; or install the CPU build."
            )
        memory = kv_cache_environment(self.path, workers * self.group_size)
        if not vllm_runs_on_cpu():
            return [memory] * workers
        return [memory | cpu_threads.environment_of_worker(i, workers, self.group_size) for i in range(workers)]


class WorkersError(ProoflineError):
    """No worker is left."""


class Fleet:
    """Supervised workers, one for each environment. Start it once."""

    def __init__(
        self,
        command: Callable[[], list[str]],
        environments: Sequence[Mapping[str, str]],
        max_fast_crashes: int,
        on_line: LineSink,
        announce: Callable[[str], None],
    ) -> None:
        self._command = command
        self._environments = environments
        self._max_fast_crashes = max_fast_crashes
        self._on_line = on_line
        self._announce = announce
        self.children: list[Child] = []

    def start(self, env: Mapping[str, str]) -> None:
        """`env`: for every worker, over its own environment; the Redis url, say, which no command line may show."""
        for index, own in enumerate(self._environments):
            spec = ChildSpec(
                f"worker-{index}",
                self._command(),
                env=environment_of_proofline({**own, **env}),
                grace_s=WORKER_GRACE_S,
                max_fast_crashes=self._max_fast_crashes,
                ready_line=READY,
                hopeless=why_hopeless,
            )
            child = Child(spec, self._on_line, self._announce)
            child.start()
            self.children.append(child)

    def stop(self) -> None:
        """Lets all workers finish what they have in hand, and waits until they are gone."""
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
        """Of the workers that run now."""
        return [child.pid for child in self.children if child.pid is not None]

    def failure(self) -> str | None:
        """Why no worker is left; None as long as one is."""
        if not self.children or any(child.gave_up is None for child in self.children):
            return None
        last = self.children[-1]
        why = f"No worker is left: {last.gave_up}."
        return why if any(text in why for text in HOPELESS.values()) else with_tail(why, last)


def why_hopeless(log: Sequence[str]) -> str | None:
    """Why starting a worker again would end the same, as the log of one that never was ready tells; else None."""
    return next((why for cause, why in HOPELESS.items() if any(cause.search(line) for line in log)), None)


def with_tail(message: str, child: Child) -> str:
    """The message, and below it what the child's log tells."""
    shown = "".join(f"\n  {child.spec.name} | {line}" for line in telling_lines(child.tail))
    return f"{message} The end of its log:{shown}" if shown else message


def telling_lines(log: Sequence[str]) -> list[str]:
    """The end of a log, and before it the errors that led there: an engine's process logs the cause of its end long
    before the traceback of those who waited for it."""
    earlier, end = log[:-ERROR_TAIL_LINES], list(log[-ERROR_TAIL_LINES:])
    causes = list(dict.fromkeys(line for line in earlier if ERROR_LINE.search(line)))[-ERROR_CAUSES:]
    return [*causes, "...", *end] if causes else end
