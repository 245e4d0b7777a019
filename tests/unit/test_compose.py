"""compose.yaml and the Dockerfiles, as far as they can be checked without a Docker engine."""

from pathlib import Path
from typing import Any

import pytest

from cli.main import app

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return found


def test_every_process_of_a_node_has_a_service(services: dict[str, dict[str, Any]]) -> None:
    assert {"redis", "api", "courier", "flower", "worker-0"} <= set(services)


def test_services_run_commands_that_exist(services: dict[str, dict[str, Any]]) -> None:
    ours = [service for name, service in services.items() if name not in ("redis", "flower")]
    assert {service["command"][0] for service in ours} <= COMMANDS


def test_nothing_is_published_beyond_loopback(services: dict[str, dict[str, Any]]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_redis_keeps_what_it_was_given(services: dict[str, dict[str, Any]]) -> None:
    assert services["redis"]["command"][1:3] == ["--appendonly", "yes"]


@pytest.mark.parametrize("path", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_dockerfiles_copy_files_that_exist(path: Path) -> None:
    sources = [
        word for line in path.read_text().splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]
    ]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
