"""The complete Proofline on one machine: Redis, API, courier and workers as child processes.

The workers serve the model that is deployed (`follower.py`). The first deployment is the model of
the stack's options. `proofline up`, `proofline demo`, tests and benchmarks use the stack:

    with Stack(EngineOptions(model="tiny-qwen3", engine="synthetic"), workers=2) as stack:
        stack.wait_ready(60)
        httpx.get(f"{stack.base_url}/livez")
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
from redis import Redis

from cli.addresses import receiver_settings
from cli.machine import placement
from cli.machine.gpus import visible_gpus
from cli.model_choice import check_is_there, with_chosen_model
from cli.supervise import processes
from cli.supervise.fleet import ERROR_TAIL_LINES, Fleet, with_tail, worker_command
from cli.supervise.follower import Follower
from cli.supervise.ports import reserve_port
from cli.supervise.redis_server import LocalRedis, RedisServerError, wait_for_redis
from cli.terminal import UsageError
from poc_core.errors import ProoflineError
from poc_core.serving.places import HOST_ID_VARIABLE
from poc_core.settings import Settings, load_settings, strangers
from poc_core.state.client import connect
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from workers.engines.options import EngineOptions

API_GRACE_S = 15.0  # for unfinished answers; uvicorn itself cancels them after 10 s
COURIER_GRACE_S = 15.0  # for payloads in progress; a receiver has 10 s to answer
REDIS_GRACE_S = 15.0  # to write its append-only file
READY_POLL_S = 0.1
HTTP_TIMEOUT_S = 5.0
# Secrets that API and courier do not need.
NOT_FOR_SERVICES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "FLOWER_BASIC_AUTH", "POC_API_KEY")


class StackError(ProoflineError):
    """The stack could not be started, or one of its processes has failed for good."""


@dataclass
class Stack:
    """Proofline's processes on one machine. `stop` leaves nothing behind. Cannot be restarted."""

    # Options of all workers; `model` may be a shipped name, or empty for a deployment's model.
    options: EngineOptions
    workers: int = 1  # workers of the options' model, or of any model on a machine without GPUs
    # Most workers of another model on GPUs; None for as many as the GPUs allow.
    deployed_workers: int | None = None
    host: str = "127.0.0.1"
    port: int = 0  # 0 for a free port
    more_ports: Sequence[int] = ()  # further ports on which the API listens
    redis_url: str | None = None  # None: the stack starts a Redis
    data_dir: Path | None = None  # directory of that Redis; None for a temporary directory
    # Variables for API and workers, in addition to this process's environment.
    env: Mapping[str, str] = field(default_factory=dict)
    max_fast_crashes: int = 5  # crashes of a process in a row before it is given up
    on_line: processes.LineSink = lambda name, line: None  # gets each line of all logs
    announce: Callable[[str], None] = lambda message: None  # gets a sentence per crash and restart

    def __post_init__(self) -> None:
        self._api: processes.Child | None = None
        self._began_api: float | None = None  # the API's start; None after its first answer
        self._courier: processes.Child | None = None
        self._redis: processes.Child | None = None
        self._own_redis: LocalRedis | None = None
        self._temporary_dir: Path | None = None
        # A key for this run, because the stack must be able to call an API that requires keys.
        self._api_key = (
            self.env.get("POC_API_KEY")
            or os.environ.get("POC_API_KEY")
            or secrets.token_urlsafe(32)
        )
        if self.workers < 1:
            raise UsageError(f"A stack needs at least one worker, not {self.workers}.")
        if self.redis_url is not None and self.data_dir is not None:
            raise UsageError(
                "--data-dir is for the Redis that the stack starts; leave it out with --redis-url."
            )
        self._follower: Follower | None = None
        self._connection: Redis | None = None  # the follower's
        self._own_places: list[dict[str, str]] = []
        if self.options.model:
            self.options = options = with_chosen_model(self.options)
            groups = placement.groups_for(options, self.workers)
            self._own_places = placement.environments(options, groups, self.workers)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    @property
    def model_name(self) -> str:
        """Returns the name that clients use for the stack's model; "" if no model is given."""
        return self.options.name

    @property
    def waits_for_a_model(self) -> bool:
        """True if no model is deployed, or the deployed model has failed."""
        return self._follower is not None and self._follower.waits

    @property
    def serves(self) -> str:
        """A text about the served model and its workers."""
        fleet = self._follower and self._follower.fleet
        return f"{self.model_name}: {fleet.means}" if fleet else self.model_name

    @property
    def base_url(self) -> str:
        """The url at which clients on this machine reach the API."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        """Starts all processes. Returns when Redis answers; API and engines may still be starting.

        An error, such as StackError, AddressError or RedisServerError, leaves no process running.
        """
        self.port = reserve_port(self.host, self.port)
        self.more_ports = [reserve_port(self.host, port) for port in self.more_ports]
        try:
            began = time.monotonic()
            self._start_redis()
            self.announce(f"Redis: {time.monotonic() - began:.1f} s")
            self._began_api = time.monotonic()
            self._api = self._start_child(
                "api", self.api_command(), API_GRACE_S, {"POC_API_KEY": self._api_key}
            )
            self._courier = self._start_child("courier", self.courier_command(), COURIER_GRACE_S)
            settings = self._settings()
            self._connection = connect(settings)
            store = DeploymentStore(self._connection, settings)
            registry = WorkerRegistry(self._connection, settings)
            self._follower = Follower(
                store,
                registry,
                settings.host,
                self.options,
                self._start_fleet,
                self.announce,
                says_ready=False,  # the caller of `wait_ready` announces it
            )
            self._follower.begin()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops API, workers, courier and Redis, in this order. May be called repeatedly."""
        for part in (self._api, self._follower, self._courier, self._redis):
            if part is not None:
                part.stop()
        if self._connection is not None:
            self._connection.close()
        if self._own_redis is not None:
            self._own_redis.release()
            self._own_redis = None
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
            self._temporary_dir = None

    def kill(self) -> None:
        """Kills all processes, so that a running `stop` returns soon. For signal handlers."""
        for child in self._children():
            child.kill()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the API and all workers are ready. Raises StackError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        missing = "the API does not answer"
        key = {"Authorization": f"Bearer {self._api_key}"}
        with httpx.Client(
            base_url=self.base_url, headers=key, timeout=HTTP_TIMEOUT_S, trust_env=False
        ) as client:
            while time.monotonic() < deadline:
                own = self._follower is not None and self._follower.runs_cli_model
                for child in self._children():
                    if child.gave_up is not None and (own or child not in self._workers):
                        raise StackError(with_tail(f"{child.gave_up}.", child))
                try:
                    missing = self._missing(client)
                except (httpx.HTTPError, ValueError, KeyError, AttributeError) as error:
                    missing = f"the API does not answer ({error})"
                if not missing:
                    return
                time.sleep(READY_POLL_S)
        message = f"Not ready within {timeout_s:g} s: {missing}."
        slow = [child for child in self._workers if child.spec.name in missing] or self._workers
        raise StackError(with_tail(message, slow[0]) if slow else message)

    def _missing(self, client: httpx.Client) -> str:
        """Returns what is not ready yet; "" if all is ready. Announces the API's start-up time."""
        if self.waits_for_a_model and client.get("/api/v1/pow/status").status_code == 200:
            return ""
        ready = client.get("/ready")
        if self._began_api is not None:
            self.announce(f"API: {time.monotonic() - self._began_api:.1f} s")
            self._began_api = None
        children = self._workers
        if ready.status_code != 200 or not children:
            return f"/ready answers {ready.status_code} {ready.text[:200]}"
        workers = client.get("/api/v1/pow/status").json().get("workers", [])
        at_work = {worker["pid"] for worker in workers if worker["state"] == "ready"}
        for child in children:
            if child.pid not in at_work or not child.is_ready:
                return f"{child.spec.name} has not loaded the model"
        return ""

    def failure(self) -> str | None:
        """Returns why Redis, API, courier or all workers of --model failed for good; else None."""
        for child in (self._redis, self._api, self._courier):
            if child is not None and child.gave_up is not None:
                return with_tail(f"{child.gave_up}.", child)
        return None if self._follower is None else self._follower.failure()

    def worker_pids(self) -> list[int]:
        return [child.pid for child in self._workers if child.pid is not None]

    @property
    def api_pid(self) -> int | None:
        return self._api.pid if self._api else None

    @property
    def redis_pid(self) -> int | None:
        """The pid of the Redis that the stack started; None if there is none or it does not run."""
        return self._redis.pid if self._redis else None

    def log_tail(self, name: str) -> list[str]:
        """Returns the last lines in the log of the process `name`: "api", "redis" or "courier"."""
        return [
            line
            for child in self._children()
            if child.spec.name == name
            for line in child.tail[-ERROR_TAIL_LINES:]
        ]

    def worker_log(self, index: int = 0) -> list[str]:
        return self._workers[index].tail[-ERROR_TAIL_LINES:]

    def api_command(self) -> list[str]:
        ports = [word for port in self._ports for word in ("--port", str(port))]
        return processes.command_of_proofline("api", "--host", self.host, *ports)

    def courier_command(self) -> list[str]:
        return processes.command_of_proofline("courier")

    def worker_command(self) -> list[str]:
        return worker_command(self.options)

    @property
    def _ports(self) -> list[int]:
        return [self.port, *self.more_ports]

    @property
    def _workers(self) -> list[processes.Child]:
        fleet = None if self._follower is None else self._follower.fleet
        return [] if fleet is None else fleet.children

    def _settings(self) -> Settings:
        own = {
            name.removeprefix("POC_").lower(): value
            for name, value in self.env.items()
            if name.startswith("POC_")
        }
        return load_settings(**own | {"redis_url": self.redis_url})

    def _start_fleet(self, options: EngineOptions, own: bool) -> Fleet:
        check_is_there(options)
        places = self._own_places
        if not own:
            places = placement.environments_of_most(
                options, visible_gpus(), self.deployed_workers, self.workers
            )
        if (why := placement.short_of_memory(options, places)) is not None:
            self.announce(why)
        self.options = options
        assert self._follower is not None
        fleet = Fleet(
            self._follower.host,
            self.worker_command,
            places,
            self.max_fast_crashes,
            self.on_line,
            self.announce,
            own,
        )
        redis_url = self.redis_url or ""
        told = {"POC_REDIS_URL": redis_url, HOST_ID_VARIABLE: self._follower.id}
        fleet.start({**self.env, **told})
        return fleet

    def _start_redis(self) -> None:
        if self.redis_url is not None:
            return wait_for_redis(load_settings(redis_url=self.redis_url).redis_url)
        if self.data_dir is None:
            self._temporary_dir = Path(tempfile.mkdtemp(prefix="proofline-"))
        redis = self._own_redis = LocalRedis(self.data_dir or self._temporary_dir or Path())
        self.redis_url = redis.url
        self._redis = self._add_child(
            processes.ChildSpec(
                "redis",
                redis.command,
                grace_s=REDIS_GRACE_S,
                # Redis' clients end first; otherwise they would log errors about the missing Redis.
                orphan_grace_s=5.0,
                inherited_fds=(redis.lock_fd,),
                remove_when_orphaned=self._temporary_dir,
                max_fast_crashes=self.max_fast_crashes,
            )
        )
        try:
            wait_for_redis(redis.url)
        except RedisServerError as error:
            raise StackError(with_tail(f"Our own {error}", self._redis)) from error

    def _start_child(
        self, name: str, command: list[str], grace_s: float, own: Mapping[str, str] = {}
    ) -> processes.Child:
        # In the environment: the url contains a password, and command lines are not private.
        settings = receiver_settings(self.host, self._ports, {**os.environ, **self.env})
        env = processes.environment_of_proofline(
            {**settings, **self.env, "POC_REDIS_URL": self.redis_url or "", **own},
            (*NOT_FOR_SERVICES, *strangers(os.environ)),  # `up` names them once for all
        )
        return self._add_child(
            processes.ChildSpec(name, command, env, grace_s, max_fast_crashes=self.max_fast_crashes)
        )

    def _add_child(self, spec: processes.ChildSpec) -> processes.Child:
        child = processes.Child(spec, self.on_line, self.announce)
        child.start()
        return child

    def _children(self) -> list[processes.Child]:
        return [
            child
            for child in (self._api, *self._workers, self._courier, self._redis)
            if child is not None
        ]
