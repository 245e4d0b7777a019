"""The whole of Proofline on one machine: Redis, API and workers as supervised children of this process.

`proofline up` and `proofline demo` run on it, and tests and benchmarks use it as a context manager:

    with Stack(model="tiny-qwen3", engine="synthetic", workers=2) as stack:
        stack.wait_ready(60)
        httpx.get(f"{stack.base_url}/health")
"""

import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from cli.console import UsageError
from cli.cpu_memory import kv_cache_environment
from cli.gpus import groups_of_gpus, visible_gpus, vllm_runs_on_cpu
from cli.model_choice import choose_model
from cli.processes import Child, ChildSpec, LineSink, command_of_proofline, environment_of_proofline
from cli.redis_server import OwnRedis, RedisServerError, wait_for_redis
from poc_core.errors import ProoflineError
from workers import cpu_threads

API_GRACE_S = 15.0  # for answers under way; uvicorn itself gives up on them after 10 s
COURIER_GRACE_S = 15.0  # for payloads on their way: a receiver has 10 s to answer
WORKER_GRACE_S = 30.0  # to finish the running batch and take the engine down
REDIS_GRACE_S = 15.0  # to write its append-only file
READY_POLL_S = 0.1
HTTP_TIMEOUT_S = 5.0
ERROR_TAIL_LINES = 20  # of a failed child's log, in the error
ERROR_CAUSES = 5  # lines from further up that look like a cause
ERROR_LINE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")


class StackError(ProoflineError):
    """The stack cannot be started, or does not work."""


@dataclass
class Stack:
    """Configuration, then the running processes. Start it once; `stop` leaves nothing running and nothing on disk."""

    model: str  # a directory, a shipped model's name, or a name on the hub
    engine: str = "vllm"
    served_model_name: str | None = None
    dtype: str = "auto"
    workers: int = 1
    host: str = "127.0.0.1"
    port: int = 0  # 0: one that is free
    redis_url: str | None = None  # None: a Redis of our own
    data_dir: Path | None = None  # of our own Redis; None: a temporary directory
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    synthetic_step_ms: float = 50.0
    max_batch_tokens: int | None = None
    vllm_args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # for API and workers, beside this process's own
    max_fast_crashes: int = 5  # of one process in a row, then it is given up
    on_line: LineSink = lambda name, line: None  # every line of every log
    announce: Callable[[str], None] = lambda message: None  # crashes and restarts, one sentence each

    def __post_init__(self) -> None:
        self._api: Child | None = None
        self._courier: Child | None = None
        self._workers: list[Child] = []
        self._redis: Child | None = None
        self._own_redis: OwnRedis | None = None
        self._temporary_dir: Path | None = None
        if self.workers < 1:
            raise UsageError(f"A stack needs at least one worker, not {self.workers}.")
        self._model_path, self.model_name = choose_model(self.model, self.served_model_name)
        if self.engine != "vllm" and (self.tensor_parallel * self.pipeline_parallel > 1 or self.vllm_args):
            raise UsageError(f"Parallelism and arguments after -- are vLLM's; the {self.engine} engine takes neither.")
        self._gpu_groups = self._assign_gpus()
        if self.redis_url is not None and self.data_dir is not None:
            raise UsageError("--data-dir is for the Redis that the stack starts; leave it out with --redis-url.")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    @property
    def base_url(self) -> str:
        """Where this machine reaches the API."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        """Starts everything and returns once Redis answers; engines go on loading. Raises StackError or
        RedisServerError, with nothing left running."""
        self.port = reserve_port(self.host, self.port)
        try:
            self._start_redis()
            self._api = self._start_child("api", self.api_command(), API_GRACE_S)
            self._courier = self._start_child("courier", self.courier_command(), COURIER_GRACE_S)
            memory = self._reserved_memory()
            for index in range(self.workers):
                pinned = {"CUDA_VISIBLE_DEVICES": ",".join(self._gpu_groups[index])} if self._gpu_groups else {}
                own_env = memory | pinned | self._own_cpus(index)
                child = self._start_child(f"worker-{index}", self.worker_command(), WORKER_GRACE_S, own_env)
                self._workers.append(child)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops API, workers, courier and Redis, in this order, and waits until they are gone. May be called twice."""
        if self._api is not None:
            self._api.stop()
        for worker in self._workers:
            worker.request_stop()
        for worker in self._workers:
            worker.wait_stopped()
        if self._courier is not None:
            self._courier.stop()
        if self._redis is not None:
            self._redis.stop()
        if self._own_redis is not None:
            self._own_redis.release()
            self._own_redis = None
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
            self._temporary_dir = None

    def kill(self) -> None:
        """Hurries a `stop` under way: SIGKILL for all that still runs. For signal handlers; does not wait."""
        for child in self._children():
            child.request_stop()  # the first ends it orderly,
            child.request_stop()  # the second at once

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the API is ready and all our workers have loaded the model.

        Raises StackError with the end of the log when a process was given up, or after `timeout_s` seconds.
        """
        import httpx

        deadline = time.monotonic() + timeout_s
        missing = "the API does not answer"
        with httpx.Client(base_url=self.base_url, timeout=HTTP_TIMEOUT_S, trust_env=False) as client:
            while time.monotonic() < deadline:
                for child in self._children():
                    if child.gave_up is not None:
                        raise StackError(self._with_tail(f"{child.gave_up}.", child))
                try:
                    ready = client.get("/ready")
                    missing = f"/ready answers {ready.status_code} {ready.text[:200]}"
                    if ready.status_code == 200:
                        workers = client.get("/api/v1/pow/status").json().get("workers", [])
                        at_work = {worker["pid"] for worker in workers if worker["state"] == "ready"}
                        waiting_for = [child for child in self._workers if child.pid not in at_work]
                        if not waiting_for:
                            return
                        missing = f"{waiting_for[0].spec.name} has not loaded the model"
                except (httpx.HTTPError, ValueError, KeyError, AttributeError) as error:
                    missing = f"the API does not answer ({error})"
                time.sleep(READY_POLL_S)
        slow = next((child for child in self._workers if child.spec.name in missing), self._workers[0])
        raise StackError(self._with_tail(f"Not ready within {timeout_s:g} s: {missing}.", slow))

    def failure(self) -> str | None:
        """Why the stack cannot work any more: Redis, the API, the courier or every worker was given up. Else None."""
        essential = [child for child in (self._redis, self._api, self._courier) if child is not None]
        for child in essential:
            if child.gave_up is not None:
                return self._with_tail(f"{child.gave_up}.", child)
        if self._workers and all(worker.gave_up is not None for worker in self._workers):
            return self._with_tail(f"No worker is left: {self._workers[-1].gave_up}.", self._workers[-1])
        return None

    def worker_pids(self) -> list[int]:
        """The pids of the worker processes that run now."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    @property
    def api_pid(self) -> int | None:
        return self._api.pid if self._api else None

    @property
    def redis_pid(self) -> int | None:
        """None with a Redis that is not ours."""
        return self._redis.pid if self._redis else None

    def log_tail(self, name: str, lines: int = ERROR_TAIL_LINES) -> list[str]:
        """The last lines that "api", "redis" or "worker-0" wrote."""
        return [line for child in self._children() if child.spec.name == name for line in child.tail[-lines:]]

    def api_command(self) -> list[str]:
        return command_of_proofline("api", "--host", self.host, "--port", str(self.port))

    def courier_command(self) -> list[str]:
        return command_of_proofline("courier")

    def worker_command(self) -> list[str]:
        options: dict[str, object] = {
            "model": self._model_path,
            "served-model-name": self.model_name,
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

    def _assign_gpus(self) -> list[list[str]]:
        """The GPUs of each worker; empty where none are to be pinned."""
        if self.engine == "synthetic" or (self.engine == "vllm" and vllm_runs_on_cpu()):
            return []
        gpus = visible_gpus()
        return groups_of_gpus(gpus, self.workers, self.tensor_parallel * self.pipeline_parallel) if gpus else []

    def _reserved_memory(self) -> dict[str, str]:
        if self.engine != "vllm":
            return {}
        processes = self.workers * self.tensor_parallel * self.pipeline_parallel
        return kv_cache_environment(self._model_path, processes)

    def _own_cpus(self, index: int) -> dict[str, str]:
        if self.engine != "vllm" or self._gpu_groups or not vllm_runs_on_cpu():
            return {}
        return cpu_threads.environment_of_worker(index, self.workers, self.tensor_parallel * self.pipeline_parallel)

    def _start_redis(self) -> None:
        if self.redis_url is not None:
            return wait_for_redis(self.redis_url)
        if self.data_dir is None:
            self._temporary_dir = Path(tempfile.mkdtemp(prefix="proofline-"))
        redis = self._own_redis = OwnRedis(self.data_dir or self._temporary_dir or Path())
        self.redis_url = redis.url
        self._redis = self._add_child(
            ChildSpec(
                "redis",
                redis.command,
                grace_s=REDIS_GRACE_S,
                # Its clients end first, or their last words would be complaints about the missing Redis.
                orphan_grace_s=5.0,
                inherited_fds=(redis.lock_fd,),
                remove_when_orphaned=self._temporary_dir,
                max_fast_crashes=self.max_fast_crashes,
            )
        )
        try:
            wait_for_redis(redis.url)
        except RedisServerError as error:
            raise StackError(self._with_tail(f"Our own {error}", self._redis)) from error

    def _start_child(
        self, name: str, command: list[str], grace_s: float, own_env: Mapping[str, str] | None = None
    ) -> Child:
        # The url holds a password: the environment is private, a command line is not.
        env = {**(own_env or {}), **self.env, "POC_REDIS_URL": self.redis_url or ""}
        return self._add_child(
            ChildSpec(
                name,
                command,
                env=environment_of_proofline(env),
                grace_s=grace_s,
                max_fast_crashes=self.max_fast_crashes,
            )
        )

    def _add_child(self, spec: ChildSpec) -> Child:
        child = Child(spec, self.on_line, self.announce)
        child.start()
        return child

    def _children(self) -> list[Child]:
        return [child for child in (self._api, *self._workers, self._courier, self._redis) if child is not None]

    def _with_tail(self, message: str, child: Child) -> str:
        shown = "".join(f"\n  {child.spec.name} | {line}" for line in telling_lines(child.tail))
        return f"{message} The end of its log:{shown}" if shown else message


def telling_lines(log: Sequence[str]) -> list[str]:
    """The end of a log, and before it the errors that led there: an engine's process logs the cause of its end long
    before the traceback of those who waited for it."""
    earlier, end = log[:-ERROR_TAIL_LINES], list(log[-ERROR_TAIL_LINES:])
    causes = list(dict.fromkeys(line for line in earlier if ERROR_LINE.search(line)))[-ERROR_CAUSES:]
    return [*causes, "...", *end] if causes else end


def reserve_port(host: str, port: int) -> int:
    """`port`, or a free one for 0, after checking that `host` can be listened on. Raises StackError that says what to
    change."""
    if not 0 <= port <= 65535:
        raise StackError(f"A port is a number from 0 to 65535, not {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As uvicorn does: connections of an earlier run that linger in TIME_WAIT are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            chosen: int = probe.getsockname()[1]
    except OSError as error:
        raise StackError(
            f"Cannot listen on {host} port {port} ({error.strerror}): stop what uses it, or choose another --port."
        ) from error
    return chosen
