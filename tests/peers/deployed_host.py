"""A host whose reports a test chooses, and the node's answers."""

from collections.abc import Callable
from typing import Any

from fastapi.testclient import TestClient

from poc_core.serving.deployments import DeploymentRecord, HostReport, HostState
from poc_core.state.deployments import DeploymentStore
from tests.harness.samples import MODEL, known
from tests.harness.waiting import wait_until

UP = {
    "model": MODEL,
    "dtype": "auto",
    "additional_args": ["--max-model-len", "512", "--port", "5000"],
}

Serve = Callable[..., Any]


class Host:
    """Reports what it is told to."""

    def __init__(self, store: DeploymentStore) -> None:
        self.store = store

    def record(self) -> DeploymentRecord:
        return known(self.store.read())

    def says(self, state: HostState, name: str = "h1", **changes: Any) -> None:
        record = self.store.read()
        wanted = record.wanted if record else None
        said = {
            "generation": record.generation if record else 0,
            "model": wanted.name if wanted else None,
        }
        self.store.report(HostReport(id=name, host=name, state=state, **(said | changes)))


def up_status(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/v1/inference/up/status").json()
    return found


def state(client: TestClient) -> tuple[str, str, bool]:
    answer = client.get("/api/v1/state").json()
    return answer["state"], answer["loaded_model"], answer["inference_healthy"]


def wait_generation(store: DeploymentStore, generation: int) -> None:
    wait_until(
        lambda: (record := store.read()) and record.generation == generation,
        f"generation {generation}",
    )
