"""The workers as the console lists them: what supervisors keep, and who registered by itself."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from poc_core.records import WorkerRecord
from poc_core.serving.deployments import HostReport


def rows(workers: Sequence[WorkerRecord], hosts: Sequence[HostReport]) -> list[dict[str, Any]]:
    """A row for each place of a supervisor and each worker without one, by name.

    A worker that is being restarted has its row too, without a record of its own.
    """
    left = {worker.name: worker for worker in workers}
    found = []
    for host in hosts:
        for place in host.places:
            worker = left.get(place.name)
            if worker is not None and worker.pid == place.pid:
                del left[place.name]
            else:
                worker = None
            about = place.model_dump(exclude={"pid", "restarts_lately", "is_ready"})
            found.append({**about, **_about(worker), "host": host.host, "model": host.model})
            if worker is None:
                found[-1]["state"] = (
                    "given up" if place.gave_up else "starting" if place.pid else "away"
                )
    for worker in left.values():
        alone = {"name": worker.name, "since": worker.started_at, "restarts": None}
        found.append({**alone, **_about(worker), "host": worker.host, "model": worker.model})
    return sorted(found, key=lambda row: _natural(row["name"]))


def _about(worker: WorkerRecord | None) -> dict[str, Any]:
    if worker is None:
        return {"id": None, "pid": None, "gpus": []}
    return {
        "id": worker.id,
        "pid": worker.pid,
        "state": worker.state,
        "engine": worker.engine,
        "info": vars(worker.info) if worker.info else None,
        "gpus": [f"{device['index']}: {device['name']}" for device in devices_of(worker)],
    }


def figures(workers: Sequence[WorkerRecord]) -> dict[str, JsonValue]:
    """What the GPUs of each worker do, by its name; of several: mean use, all memory, the hottest."""
    found: dict[str, JsonValue] = {}
    for worker in workers:
        devices = devices_of(worker)
        use = [
            d["utilization_percent"] for d in devices if d.get("utilization_percent") is not None
        ]
        heat = [d["temperature_c"] for d in devices if d.get("temperature_c") is not None]
        if devices:
            found[worker.name] = {
                "use": sum(use) / len(use) if use else None,
                "used_mb": sum(d.get("used_memory_mb") or 0 for d in devices),
                "total_mb": sum(d.get("total_memory_mb") or 0 for d in devices),
                "celsius": max(heat, default=None),
            }
    return found


def devices_of(worker: WorkerRecord) -> list[Mapping[str, Any]]:
    """The GPUs that the worker may use, or all of its machine's where it is not pinned."""
    devices = worker.gpus.get("devices")
    if not isinstance(devices, list):
        return []
    pinned = [part.strip() for part in worker.visible_gpus.split(",") if part.strip()]
    return [
        device
        for device in devices
        if isinstance(device, dict)
        and (not pinned or str(device.get("index")) in pinned or str(device.get("uuid")) in pinned)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """By which names are sorted: gpu10 comes after gpu9."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
