"""The GPUs of all the node's machines."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from poc_core.gpus import Gpu, GpuDriver, GpuWatch, MachineGpus
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import worker_record

DRIVER = GpuDriver(driver_version="580", cuda_driver_version="13.1", nvml_version="13")


def machine(host: str, *uuids: str) -> MachineGpus:
    return MachineGpus(
        devices=[Gpu(index=index, uuid=uuid, host=host) for index, uuid in enumerate(uuids)],
        driver=DRIVER,
    )


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[MachineGpus], None]:
    """What the API's own machine has."""
    return lambda found: monkeypatch.setattr(GpuWatch, "now", lambda _: found)


@pytest.fixture
def tell(workers: WorkerRegistry) -> Callable[[str, MachineGpus], None]:
    """A worker tells of its machine's."""
    return lambda name, found: workers.heartbeat(
        replace(worker_record(name), gpus=found.model_dump())
    )


def test_without_a_gpu_there_are_none(client: TestClient, own: Any, tell: Any) -> None:
    own(MachineGpus())
    tell("w1", MachineGpus())
    assert client.get("/api/v1/gpu/devices").json() == {"devices": [], "count": 0}
    nothing = {"driver_version": None, "cuda_driver_version": None, "nvml_version": None}
    assert client.get("/api/v1/gpu/driver").json() == nothing


def test_an_api_without_gpus_tells_those_of_the_workers_hosts_each_once(
    client: TestClient, own: Any, tell: Any
) -> None:
    own(MachineGpus())
    tell("a1", machine("a", "GPU-1", "GPU-2"))
    tell("a2", machine("a", "GPU-1", "GPU-2"))
    tell("b1", machine("b", "GPU-3"))
    found = client.get("/api/v1/gpu/devices").json()
    assert [(gpu["index"], gpu["host"], gpu["uuid"]) for gpu in found["devices"]] == [
        *((0, "a", "GPU-1"), (1, "a", "GPU-2"), (2, "b", "GPU-3"))
    ]
    assert found["count"] == 3
    assert client.get("/api/v1/gpu/driver").json() == DRIVER.model_dump()


def test_the_apis_own_come_first_also_without_workers(client: TestClient, own: Any) -> None:
    own(machine("here", "GPU-9"))
    (gpu,) = client.get("/api/v1/gpu/devices").json()["devices"]
    wanted = {
        "index",
        "name",
        "total_memory_mb",
        "free_memory_mb",
        "used_memory_mb",
        "utilization_percent",
    }
    assert gpu.keys() >= wanted | {"temperature_c", "is_available", "error_message"}
