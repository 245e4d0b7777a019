"""Pods of the chart as processes here: their commands, environments, mounts, user and network.

Each pod has a network namespace with an address of its own, joined by a bridge in another one, so
nothing is seen from outside. Each container has namespaces for mounts, processes and its host name,
and a read-only root: that of an image that was built here (tests/images), or this machine's own
(`enter.py`). Needs root.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cli.supervise.redis_server import find_redis_server
from tests.cluster.chart import Object, environment, labels_of, pod_of, running
from tests.harness.compose_file import ROOT, dockerfile_commands
from tests.images.dockerfile import Image

USER = 10001
START_S = 60.0
BIN = Path(sys.executable).parent
# Where programs of this machine lie that stand in for images' own.
_OTHERS = [
    str(Path(found).parent)
    for found in (str(find_redis_server()), shutil.which("nginx"))
    if found is not None
]
# Theirs first: the environment's own Redis, that of a wheel, may be older.
PATH = os.pathsep.join([*_OTHERS, str(BIN), "/usr/sbin:/usr/bin:/sbin:/bin"])
_ENTER = Path(__file__).with_name("enter.py")
_HERE = Path("/")
_KEPT = sorted({str(ROOT), sys.base_prefix, *_OTHERS})
_NETWORK = "10.77.0"
_PROBE = """\
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2]))
"""
Secrets = Mapping[str, Mapping[str, str]]


def possible() -> bool:
    """Whether this process may make namespaces and mounts."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter", "setpriv"))):
        return False
    return (
        subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode == 0
    )


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@dataclass
class Container:
    spec: Object
    environment: dict[str, str]
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def main(self) -> int:
        """The process id of what runs in it: the child of `unshare`, once it is its user's."""
        assert self.process is not None
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process.poll() is None, self.said()
            for child in self._children():
                if f"Uid:\t{USER}\t" in Path(f"/proc/{child}/status").read_text():
                    return child
            time.sleep(0.02)
        raise AssertionError(f"the container was not made: {self.said()}")

    def kill(self) -> None:
        """Ends all that runs in it. A child that has changed its user outlives `unshare`, whatever
        `--kill-child` says: the kernel forgets it then.
        """
        if self.process is not None and self.process.poll() is None:
            for child in self._children():
                os.kill(child, signal.SIGKILL)
            self.process.kill()
            self.process.wait()

    def _children(self) -> list[int]:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(child) for child in children.read_text().split()]

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@dataclass
class Pod:
    name: str
    spec: Object
    address: str
    namespace: str
    containers: dict[str, Container] = field(default_factory=dict)


class Cluster:
    """The pods of rendered objects, as a context manager: one of each controller."""

    def __init__(
        self,
        found: Sequence[Object],
        secrets: Secrets,
        folder: Path,
        images: Mapping[str, Image] | None = None,
    ) -> None:
        """`secrets`: what each holds, by name and key; `images`: by the name in the specs."""
        self._images = images or {}
        self._found = found
        self._secrets = secrets
        self.folder = folder
        self._prefix = f"pl{os.getpid()}"
        self.pods: dict[str, Pod] = {}
        self._others: list[subprocess.Popen[bytes]] = []
        self._namespaces: list[str] = []
        self.hosts: dict[str, str] = {}
        folder.mkdir()
        self._namespace("net")
        run("ip", "-n", self.network, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.network, "addr", "add", f"{_NETWORK}.1/24", "dev", "bridge")
        run("ip", "-n", self.network, "link", "set", "bridge", "up")
        for name, controller in running(found).items():
            is_set = controller["kind"] == "StatefulSet"
            pod_name = f"{name}-0" if is_set else f"{name}-5d9f7c8b6-x2x7q"
            namespace, address = self.host(name)
            self.pods[name] = Pod(pod_name, pod_of(controller), address, namespace)
        for one in found:
            if one["kind"] == "Service":
                selected = [
                    pod.address
                    for name, pod in self.pods.items()
                    if one["spec"]["selector"].items() <= labels_of(running(found)[name]).items()
                ]
                self.hosts[one["metadata"]["name"]] = selected[0]

    @property
    def network(self) -> str:
        return f"{self._prefix}-net"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pod in self.pods.values():
            for name, container in pod.containers.items():
                container.kill()
                if any(exception):
                    print(f"--- {pod.name} {name}\n{container.said()}")
        for process in self._others:
            process.terminate()
            process.wait()
        for namespace in self._namespaces:
            run("ip", "netns", "delete", namespace)

    def host(self, name: str) -> tuple[str, str]:
        """(namespace, address) of a new host in the pods' network."""
        number = len(self._namespaces) + 1
        namespace, address, link = (
            self._namespace(str(number)),
            f"{_NETWORK}.{number}",
            f"v{number}",
        )
        run(
            *("ip", "-n", self.network, "link", "add", link, "type", "veth"),
            *("peer", "name", "eth0", "netns", namespace),
        )
        run("ip", "-n", self.network, "link", "set", link, "master", "bridge", "up")
        run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", namespace, "link", "set", device, "up")
        return namespace, address

    def serve(self, name: str, command: Sequence[str]) -> None:
        """Runs a server of somebody else's on a host of its own, which pods know as `name`."""
        namespace, self.hosts[name] = self.host(name)
        inside = ["ip", "netns", "exec", namespace, *command]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._others.append(subprocess.Popen(inside, stdout=log, stderr=log))

    def start(self, name: str) -> None:
        """Starts a pod's containers as Kubernetes does, with what spec and image say."""
        pod = self.pods[name]
        for spec in pod.spec["containers"]:
            folder = self.folder / pod.name / spec["name"]
            (folder / "work").mkdir(parents=True)
            image = self._images.get(spec["image"], _this_machine(spec))
            container = Container(
                spec, self._environment(pod, spec, image), _command(spec, image), folder / "log"
            )
            pod.containers[spec["name"]] = container
            description = folder / "container.json"
            hosts = folder / "hosts"
            aliases = {
                alias: one["ip"]
                for one in pod.spec.get("hostAliases", [])
                for alias in one["hostnames"]
            }
            names = self.hosts | aliases | {"localhost": "127.0.0.1", pod.name: pod.address}
            hosts.write_text("".join(f"{ip} {known}\n" for known, ip in names.items()))
            description.write_text(
                json.dumps(
                    {
                        "work": str(folder / "work"),
                        "user": pod.spec["securityContext"]["runAsUser"],
                        "command": container.command,
                        "environment": container.environment,
                        "hosts": str(hosts),
                        "mounts": self._mounts(pod, spec, folder),
                        "image": str(image.root),
                        "kept": [] if image.root != _HERE else _KEPT,
                        "opened": [] if image.root != _HERE else ["/root"],
                    }
                )
            )
            command = [
                *("ip", "netns", "exec", pod.namespace, "unshare", "--mount", "--uts", "--pid"),
                *("--fork", "--kill-child", sys.executable, str(_ENTER), str(description)),
            ]
            with container.log.open("wb") as log:
                container.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def wait(self, name: str, probe: str, timeout_s: float) -> None:
        """Until the probe of each container of the pod succeeds, those that have it.

        AssertionError: it does not in time, or the process ended.
        """
        pod = self.pods[name]
        until = time.monotonic() + timeout_s
        for container in pod.containers.values():
            while probe in container.spec and not self._succeeds(pod, container, probe):
                assert time.monotonic() < until, f"{name}, {probe}: {container.said()}"
                time.sleep(0.3)

    def inside(self, name: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Runs a command in the pod's first container, as `kubectl exec` does."""
        pod = self.pods[name]
        return self._exec(pod, next(iter(pod.containers.values())), command, 120)

    def stop(self, name: str) -> dict[str, int]:
        """SIGTERM; each container's exit status. AssertionError: the grace period was short."""
        pod = self.pods[name]
        grace_s = pod.spec["terminationGracePeriodSeconds"]
        for container in pod.containers.values():
            os.kill(container.main, signal.SIGTERM)
        ended = {}
        for one, container in pod.containers.items():
            assert container.process is not None
            try:
                ended[one] = container.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} did not end: {container.said()}") from None
        return ended

    def _namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        run("ip", "netns", "add", namespace)
        self._namespaces.append(namespace)
        return namespace

    def _environment(self, pod: Pod, spec: Object, image: Image) -> dict[str, str]:
        found = image.environment | {"HOSTNAME": pod.name}
        for name, value in environment(self._found, spec).items():
            match value:
                case {"secretKeyRef": {"name": secret, "key": key}} if key in self._secrets[secret]:
                    found[name] = self._secrets[secret][key]
                case {"fieldRef": {"fieldPath": "status.podIP"}}:
                    found[name] = pod.address
                case str():
                    found[name] = value
                case _:
                    assert value["secretKeyRef"]["optional"], value
        return found

    def _mounts(self, pod: Pod, spec: Object, folder: Path) -> list[dict[str, Any]]:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        found = []
        # Shorter paths first: a claim may lie within another volume.
        for mount in sorted(spec["volumeMounts"], key=lambda one: len(one["mountPath"])):
            volume = volumes.get(mount["name"], {"claim": mount["name"]})
            source, options = folder / "volumes" / mount["name"], "size=100%"
            match volume:
                case {"emptyDir": limits}:
                    if "sizeLimit" in limits:
                        options = f"size={limits['sizeLimit'].removesuffix('i')}"
                    source = None
                case {"secret": secret}:
                    keys = self._secrets[secret["secretName"]]
                    items = secret.get("items") or [{"key": key, "path": key} for key in keys]
                    _write(source, {item["path"]: keys[item["key"]] for item in items})
                case {"configMap": {"name": name}}:
                    (held,) = (
                        one
                        for one in self._found
                        if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", name)
                    )
                    _write(source, held["data"])
                case _:
                    source.mkdir(parents=True)
                    shutil.chown(source, USER, USER)
            found.append(
                {
                    "path": mount["mountPath"],
                    "source": str(source) if source else None,
                    "options": options,
                    "read_only": mount.get("readOnly", False),
                }
            )
        return found

    def _succeeds(self, pod: Pod, container: Container, probe: str) -> bool:
        wanted = container.spec[probe]
        patience_s = wanted.get("timeoutSeconds", 1) + 20  # this machine's, which is busy
        if "exec" in wanted:
            return not self._exec(pod, container, wanted["exec"]["command"], patience_s).returncode
        asked = wanted["httpGet"]
        (port,) = (
            one["containerPort"] for one in container.spec["ports"] if one["name"] == asked["port"]
        )
        url = f"http://{pod.address}:{port}{asked['path']}"
        command = ["ip", "netns", "exec", self.network, sys.executable, "-c", _PROBE, url]
        assert container.main  # it lives
        return not subprocess.run([*command, str(patience_s)], capture_output=True).returncode

    def _exec(
        self, pod: Pod, container: Container, command: Sequence[str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        user = str(USER)
        inside = [
            *("nsenter", "--target", str(container.main), "--mount", "--uts", "--net", "--pid"),
            *("--root", "--wd", "--", "setpriv", "--reuid", user, "--regid", user, "--groups"),
            *(user, "--no-new-privs", "--bounding-set", "-all", "--inh-caps", "-all", "--"),
        ]
        return subprocess.run(
            [*inside, *command],
            env=container.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


def _this_machine(spec: Object) -> Image:
    """In place of an image: this machine's root, with the entrypoint of the image's Dockerfile."""
    environment = {"PATH": PATH, "HOME": "/nowhere"}
    if "proofline" not in spec["image"]:
        return Image(_HERE, environment)
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    name = spec["image"].rpartition("/")[2].partition(":")[0].removeprefix("proofline-")
    commands = dockerfile_commands(ROOT / "docker" / f"{name}.Dockerfile")
    return Image(_HERE, environment, entrypoint=commands["ENTRYPOINT"], command=commands["CMD"])


def _command(spec: Object, image: Image) -> list[str]:
    """As Kubernetes starts it: what the spec does not say is the image's."""
    return [*spec.get("command", image.entrypoint), *spec.get("args", image.command)]


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
