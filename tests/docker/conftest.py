"""Real containers on a real engine: `make docker` starts one where none answers."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.compose_file import ROOT

# Of images whose engine comes from a place other than PyPI: tests/docker/engine.sh.
PYTHON = os.environ.get("PROOFLINE_DOCKER_PYTHON", "python:3.12-slim-bookworm")
BUILD_S, COMMAND_S = 2400, 900


def answers() -> bool:
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


MARKS = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("docker"),
    pytest.mark.skipif(
        not answers(), reason="no Docker engine answers: `make docker` starts one of its own"
    ),
]


def run(*command: str, timeout_s: float = COMMAND_S, **options: Any) -> str:
    """The command's stdout; an error shows all that it wrote."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return str(done.stdout)


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.5)


class Project:
    """A Compose project in a folder; commands are those of an operator."""

    def __init__(self, folder: Path, name: str, *files: str, **env: str) -> None:
        self.folder = folder
        self.name = name
        self.files = list(files)
        self._env = {**os.environ, "COMPOSE_PROJECT_NAME": name, **env}

    def __call__(self, *arguments: str, files: Sequence[str] = ()) -> str:
        chosen = [word for file in (*self.files, *files) for word in ("-f", file)]
        return run("docker", "compose", *chosen, *arguments, cwd=self.folder, env=self._env)

    def exec(self, service: str, *command: str) -> str:
        return self("exec", "-T", service, *command)

    def container(self, service: str) -> dict[str, Any]:
        """What `docker inspect` says of the service's container."""
        found = self("ps", "-a", "-q", service).split()
        document: list[dict[str, Any]] = json.loads(run("docker", "inspect", *found[:1]))
        return document[0]

    def is_healthy(self, service: str) -> bool:
        return bool(self.container(service)["State"].get("Health", {}).get("Status") == "healthy")

    def end(self) -> None:
        self("--profile", "*", "down", "-v", "--remove-orphans", "-t", "5")


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git knows of the working tree, as a clone would have it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    (folder / "compose.override.yaml").write_text(
        f"services:\n  worker: {{build: {{args: {{PYTHON: '{PYTHON}'}}}}}}\n"
    )
    return folder


@pytest.fixture(scope="session")
def node_image(checkout: Path) -> str:
    return build(checkout, "node", "proofline-node", BASE="cpu", PYTHON=PYTHON)


def build(checkout: Path, name: str, tag: str, **arguments: str) -> str:
    given = [word for one in arguments.items() for word in ("--build-arg", "=".join(one))]
    command = ["docker", "build", "-q", "-f", f"docker/{name}.Dockerfile", "-t", tag]
    run(*command, *given, ".", cwd=checkout, timeout_s=BUILD_S)
    return tag


@pytest.fixture(scope="session")
def compose_images(checkout: Path) -> Path:
    """The checkout, whose images are built."""
    run("docker", "compose", "build", "-q", cwd=checkout, timeout_s=BUILD_S)
    return checkout
