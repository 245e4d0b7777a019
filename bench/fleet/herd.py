"""Hosts with workers, forked from one process that has imported all modules they need.

`python -m bench.fleet.herd` reads an `Order` as a line of JSON. A host is a process with the
supervisor of `proofline workers`, and each of its child processes calls `run_worker`. A process
cannot hold two workers because of Celery's signals. Forked workers share the memory of modules.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
from pydantic import BaseModel

from bench.fleet.centre import SPEC
from cli.supervise.fleet import Fleet, slots
from cli.supervise.follower import Follower
from cli.supervise.processes import Child, ChildSpec
from poc_core.serving.places import HOST_ID_VARIABLE, SLOT_VARIABLE
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from workers.engines.options import EngineOptions
from workers.engines.synthetic import SyntheticEngine

PER_HOST = 8
GRACE_S = 60.0
_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1


class Order(BaseModel):
    """The workers that a herd starts."""

    workers: int
    options: EngineOptions
    redis_url: str
    logs: str  # a folder


class Herd:
    """Hosts with workers, as a context manager; all processes end with the context."""

    def __init__(self, workers: int, options: EngineOptions, redis_url: str) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="herd-")
        self._order = Order(
            workers=workers, options=options, redis_url=redis_url, logs=self._logs.name
        )

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.fleet.herd"],
            stdin=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # what is forked has one thread
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._order.model_dump_json().encode() + b"\n")
        self._process.stdin.flush()
        return self

    def __exit__(self, *_exception: object) -> None:
        end(self._process)
        self._logs.cleanup()

    def hosts(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self._process.pid).children()
        return found

    def workers(self) -> list[psutil.Process]:
        return [worker for host in self.hosts() for worker in host.children()]


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process by SIGTERM, or by SIGKILL after GRACE_S; its children end too."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


class _Forked(Child):
    """A worker that is forked and never restarted."""

    def __init__(self, spec: ChildSpec, log: Path, run: Callable[[], None]) -> None:
        super().__init__(spec, lambda name, line: None, lambda text: None)
        self._log = log
        self._run = run

    @property
    def tail(self) -> list[str]:
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()

    def start(self) -> None:
        self._log.touch()
        self.pid = fork(self._work)
        self._note_ready()

    def _work(self) -> None:
        with self._log.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(self.spec.env)
        self._run()

    def request_stop(self) -> None:
        assert self.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def wait_stopped(self) -> None:
        assert self.pid is not None
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class _ForkedFleet(Fleet):
    """The workers of a host, which are forked before the host starts threads."""

    def run(self, order: Order, env: Mapping[str, str]) -> None:
        from workers.main import run_worker

        for own, slot in zip(self.environments, slots(self.environments), strict=True):
            name = f"{self.host}/{slot}"
            spec = ChildSpec(name, (), env={**own, **env, SLOT_VARIABLE: slot})
            log = Path(order.logs, name.replace("/", "-"))
            child = _Forked(spec, log, lambda: run_worker(order.options, None, order.redis_url))
            child.start()
            self.children.append(child)


def fork(run: Callable[[], None]) -> int:
    """Forks a process that calls `run` and ends, at the latest with its parent; returns the pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with_parent()
        if os.getppid() == parent:
            run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _host(order: Order, number: int, n_workers: int) -> None:
    name = f"host{number:03}"
    os.environ["POC_HOST_NAME"] = name
    settings = load_settings(redis_url=order.redis_url)
    redis = connect(settings)

    def start_fleet(options: EngineOptions, own: bool) -> Fleet:
        places: list[dict[str, Any]] = [{} for _ in range(n_workers)]
        fleet = _ForkedFleet(name, list, places, 0, lambda *_: None, lambda _: None)
        fleet.run(order, {HOST_ID_VARIABLE: follower.id})
        return fleet

    stores = DeploymentStore(redis, settings), WorkerRegistry(redis, settings)
    follower = Follower(*stores, name, order.options, start_fleet, lambda message: None)
    follower.begin()
    wait_for_sigterm()
    follower.stop()


def wait_for_sigterm() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.wait()


def main() -> None:
    import kombu.transport.redis  # noqa: F401

    import workers.main  # noqa: F401

    end_with_parent()  # before reading: a parent that has ended sends nothing
    order = Order.model_validate_json(sys.stdin.readline())
    # Real workers run on other machines, so here they must not keep Redis and API waiting: with
    # SCHED_IDLE they get only the time that is left.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Imports numpy once. Otherwise all workers would import it at the same time with their first
    # proofs, which takes both cores for half a minute.
    SyntheticEngine(order.options).compute_batch(SPEC, [0])
    gc.collect()
    gc.freeze()
    pids = []
    for number, first in enumerate(range(0, order.workers, PER_HOST)):
        n = min(PER_HOST, order.workers - first)
        pids.append(fork(lambda number=number, n=n: _host(order, number, n)))  # type: ignore[misc]
    wait_for_sigterm()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
