"""The services of compose.yaml as processes here: their very commands and environments.

Only what a container has of its own is replaced: names by loopback and free ports, volumes by
temporary folders.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from typing import IO, Any, Self

from redis import Redis

from cli.supervise.redis_server import find_redis_server, free_port, version_of
from tests.harness import compose_file
from tests.harness.compose_file import ROOT

HOST = "127.0.0.1"
BIN = Path(sys.executable).parent
GRACE_S = 180.0
HEALTHY_S = 240.0
SLOWNESS = 5.0  # of a machine with other work: so many times a grace period is one there
REDIS = find_redis_server()
PROGRAMS = {
    # On a lent GPU host it is a script (scripts/gpu_host/installed.sh).
    "proofline": which("proofline", path=str(BIN)) or which("proofline") or "proofline",
    "redis-server": str(REDIS),
}


class LocalCompose:
    """The services, as a context manager; all are stopped at the end, the last first."""

    def __init__(
        self,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`variables`: of .env, for compose.yaml itself; `settings`: of .env, for every process."""
        found = compose_file.services(variables)
        # Without others' programs, which are not on this machine.
        self.services = {
            name: one for name, one in found.items() if "monitoring" not in one.get("profiles", ())
        }
        self._settings = dict(settings or {})
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []
        self._ports = {name: str(free_port()) for name in ("6379", "8000", "5555")}
        (folder / "home").mkdir()
        # By service: path in its container -> path here.
        self._paths = {
            name: dict(map(self._mounted, one.get("volumes", [])))
            for name, one in self.services.items()
        }
        self._paths["secrets"]["/run/each"] = str(folder / "each")
        self._texts = {"@redis:": f"@{HOST}:", "0.0.0.0": HOST, **self._ports}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with ExitStack() as exits:  # each is stopped, also after one that does not end in time
            for log in self._logs:
                exits.callback(log.close)
            for name in self.processes:
                exits.callback(self.stop, name)
        if any(exception):
            for name in self.processes:
                print(f"--- {name}\n{self.log(name)[-4000:]}")

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self._ports['8000']}"

    @property
    def flower_url(self) -> str:
        return f"http://{HOST}:{self._ports['5555']}"

    @property
    def redis_url(self) -> str:
        """The operator's url of Redis."""
        return self.redis_url_of("default", self.secret("redis_password"))

    def redis_url_of(self, user: str, password: str) -> str:
        return f"redis://{user}:{password}@{HOST}:{self._ports['6379']}/0"

    @property
    def redis_port(self) -> int:
        return int(self._ports["6379"])

    def refused_by_redis(self) -> list[dict[str, Any]]:
        """What services asked of Redis that their users may not.

        But for redis-py's own tries, and for scripts that were not loaded yet: who may not load
        them finds out by trying.
        """
        with Redis.from_url(self.redis_url) as client:
            log: list[dict[str, Any]] = client.acl_log()
        return [
            entry
            for entry in log
            if entry["username"] in self.services
            and entry["object"] not in ("auth", "script|load", "script")
            and entry["object"].partition("|")[0] != "client"
        ]

    def secret(self, name: str) -> str:
        return (self.folder / "secrets" / name).read_text()

    def start(self, name: str) -> None:
        """Starts the service, after those it depends on are as far as it wants."""
        if name in self.processes:
            return
        service = self.services[name]
        for other, wanted in service.get("depends_on", {}).items():
            self.start(other)
            if wanted["condition"] == "service_completed_successfully":
                assert self.processes[other].wait(GRACE_S) == 0, self.log(other)
                as_redis_here_reads_it(self.folder / "redis" / "users.acl")
            else:
                self.wait_healthy(other)
        command = [self._here(name, word) for word in compose_file.command_of(service)]
        # On one machine each must listen on a port of its own.
        own_port = {"redis": "6379", "api": "8000", "flower": "5555"}.get(name)
        if own_port is not None:
            command += ["--port", self._ports[own_port]]
        if name == "redis":
            command += ["--bind", HOST]
        self.run(name, [PROGRAMS.get(command[0], command[0]), *command[1:]], self.environment(name))

    def run(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        """Starts a process that is stopped with the others, under `name`."""
        log = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log)
        self.processes[name] = subprocess.Popen(
            command,
            cwd=self.folder / "home",
            env=dict(environment),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )

    def stop(self, name: str) -> float:
        """Stops as Compose does; returns seconds. AssertionError: the grace period is short."""
        process, began = self.processes[name], time.monotonic()
        grace = self.services.get(name, {}).get("stop_grace_period", "10s")
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(SLOWNESS * float(grace.removesuffix("s")))
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(
                    f"{name} did not end within {SLOWNESS:g} times {grace}:\n"
                    + self.log(name)[-4000:]
                ) from None
        return time.monotonic() - began

    def environment(self, name: str) -> dict[str, str]:
        """The environment of the service's process: what Compose sets, and what an image has."""
        path = os.pathsep.join([str(BIN), str(REDIS.parent), os.environ["PATH"]])
        home = str(self.folder / "home")
        image = {"PATH": path, "HOME": home, "TMPDIR": home, "HOSTNAME": socket.gethostname()}
        # Variables without a value come from .env, which has none here.
        given = self.services[name].get("environment", {})
        own = {
            key: self._here(name, str(value)) for key, value in given.items() if value is not None
        }
        measured = {key: value for key, value in os.environ.items() if key.startswith("COVERAGE_")}
        return image | own | self._settings | measured

    def is_healthy(self, name: str) -> bool:
        """What the service's own health check says."""
        check: list[str] = self.services[name]["healthcheck"]["test"]
        words = ["sh", "-c", check[1]] if check[0] == "CMD-SHELL" else check[1:]
        words = [
            self._here(name, word.replace("redis-cli", f"redis-cli -p {self._ports['6379']}"))
            for word in words
        ]
        done = subprocess.run(
            words, env=self.environment(name), capture_output=True, cwd=self.folder
        )
        return done.returncode == 0

    def wait_healthy(self, name: str, timeout_s: float = HEALTHY_S) -> None:
        # As often as Compose: each health check of a worker or courier imports for a second.
        pause_s = float(self.services[name]["healthcheck"]["start_interval"].removesuffix("s"))
        until = time.monotonic() + timeout_s
        while not self.is_healthy(name):
            assert self.processes[name].poll() is None, f"{name} ended:\n{self.log(name)[-4000:]}"
            assert time.monotonic() < until, f"{name} is not healthy:\n{self.log(name)[-4000:]}"
            time.sleep(pause_s)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _mounted(self, volume: str) -> tuple[str, str]:
        """(path in a container, path here) of SOURCE:PATH[:OPTIONS]."""
        source, path, *_ = volume.split(":")
        if source.startswith("./"):
            return path, str(ROOT / source)
        # Secrets of services lie side by side, as `secrets` sees them.
        here = self.folder / source.replace("secrets-", "each/")
        here.mkdir(parents=True, exist_ok=True)
        return path, str(here)

    def _here(self, name: str, text: str) -> str:
        """A word of a service, with paths and names as they are here."""
        for container, here in self._paths[name].items():
            text = re.sub(rf"(?<![\w./-]){re.escape(container)}(?![\w.-])", here, text)
        for container, here in self._texts.items():
            text = text.replace(container, here)
        return text


def as_redis_here_reads_it(users: Path) -> None:
    """Rewrites users for a Redis before 7, which knows no keys that may only be read or written."""
    if (version_of(str(REDIS)) or (0,)) < (7,):
        users.write_text(users.read_text().replace("%R~", "~").replace("%W~", "~"))
