"""Hosts that are namespaces of this one: their own network, processes, name and shared memory.

Each is plugged into a bridge, whose own address stands for the machine that has Redis and the API.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from cli.supervise.redis_server import find_redis_server, free_port
from tests.harness.waiting import wait_until
from tests.integration.processes import descendants
from tests.stacks.up import environment

PROOFLINE = str(Path(sys.executable).parent / "proofline")
GRACE_S = 180.0


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces, for which it needs to be root."""
    try:
        name = f"pl{os.getpid()}x"
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Program:
    """A process of this machine or of a host, with its log."""

    def __init__(self, command: list[str], env: Mapping[str, str], log: Path) -> None:
        self.log_file = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                command, env=dict(env), stdout=stream, stderr=stream, stdin=subprocess.DEVNULL
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def stop(self) -> None:
        """SIGTERM, as an operator says, and to a host its command."""
        if self.process.poll() is None:
            below = descendants(self.process.pid)
            (below[0] if below else self.process).terminate()
            try:
                self.process.wait(GRACE_S)
            finally:
                self.kill()

    def kill(self) -> None:
        """SIGKILL: of a host everything that runs there, at once."""
        self.process.kill()
        self.process.wait(GRACE_S)


class Network:
    """A private network of hosts, as a context manager; all ends with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._id = f"pl{os.getpid() % 100_000}"
        self._subnet = f"10.{77 + os.getpid() % 100}.{os.getpid() // 100 % 256}"
        self._hosts: list[str] = []
        self.programs: dict[str, Program] = {}
        self.address = f"{self._subnet}.254"
        self.redis_port = 0

    def __enter__(self) -> Self:
        ip("link", "add", self._id, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self._id)
        ip("link", "set", self._id, "up")
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for program in self.programs.values():
            program.process.kill()
            program.process.wait(GRACE_S)
        for name in self._hosts:
            ip("link", "del", f"{self._id}{name}")
            ip("netns", "del", self._namespace(name))
        ip("link", "del", self._id)
        if error is not None:
            for name, program in self.programs.items():
                print(f"--- {name}\n{program.log[-6000:]}")

    @property
    def redis_url(self) -> str:
        return f"redis://{self.address}:{self.redis_port}/0"

    def address_of(self, host: str) -> str:
        return f"{self._subnet}.{self._hosts.index(host) + 1}"

    def add_host(self, name: str) -> None:
        namespace, here, there = self._namespace(name), f"{self._id}{name}", f"e{name}"
        self._hosts.append(name)
        ip("netns", "add", namespace)
        ip(
            "link",
            "add",
            here,
            "master",
            self._id,
            "type",
            "veth",
            "peer",
            there,
            "netns",
            namespace,
        )
        ip("link", "set", here, "up")
        ip("-n", namespace, "addr", "add", f"{self.address_of(name)}/24", "dev", there)
        for device in ("lo", there):
            ip("-n", namespace, "link", "set", device, "up")

    def unplug(self, name: str) -> None:
        """Pulls the host's cable: no process is told."""
        ip("link", "set", f"{self._id}{name}", "down")

    def plug(self, name: str) -> None:
        ip("link", "set", f"{self._id}{name}", "up")

    def start_redis(self) -> None:
        self.redis_port = free_port(self.address)
        words = ["--port", self.redis_port, "--bind", self.address, "--protected-mode", "no"]
        words += ["--save", "", "--dir", self._folder]
        self.here("redis", [str(find_redis_server()), *map(str, words)])
        wait_until(lambda: "Ready to accept" in self.programs["redis"].log, "Redis", 30)

    def here(self, name: str, command: list[str], **env: str) -> Program:
        """Starts a process on the machine of the bridge's address."""
        told = environment({"POC_REDIS_URL": self.redis_url, **env})
        self.programs[name] = Program(command, told, self._folder / f"{name}.log")
        return self.programs[name]

    def workers(self, host: str, *options: str, **env: str) -> Program:
        """Starts `proofline workers` on a host, which runs nothing else."""
        private = f'hostname {host}; mount -t tmpfs none /dev/shm; exec "$@"'
        command = [
            *("ip", "netns", "exec", self._namespace(host)),
            *("unshare", "--uts", "--ipc", "--mount", "--mount-proc"),
            *("--pid", "--fork", "--kill-child", "sh", "-c", private, "sh"),
            *(PROOFLINE, "workers", "--verbose", *options),
        ]
        told = {"POC_CHAT_HOST": self.address_of(host), "HOME": str(self._folder), **env}
        self.programs[host] = Program(
            command,
            environment({"POC_REDIS_URL": self.redis_url, **told}),
            self._folder / f"{host}.log",
        )
        return self.programs[host]

    def _namespace(self, host: str) -> str:
        return f"{self._id}{host}"
