"""Builds the console's table of workers, and the sensor values of their GPUs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from api.health.roster import Seat
from poc_core.records import WorkerRecord


def rows(seats: Sequence[Seat]) -> list[dict[str, Any]]:
    """Returns the table of workers by name: a row for each worker that runs or should run."""
    return [_row(seat) for seat in sorted(seats, key=lambda seat: _natural(seat.name))]


def _row(seat: Seat) -> dict[str, Any]:
    worker, place = seat.worker, seat.place
    return {
        "name": seat.name,
        "host": seat.host,
        "model": seat.model,
        "engine": seat.engine,
        "state": seat.state,
        "since": seat.since,
        "gave_up": place.gave_up if place else None,
        "restarts": place.restarts if place else None,
        "last_exit": place.last_exit if place else None,
        "last_exit_at": place.last_exit_at if place else None,
        "id": worker.id if worker else None,
        "pid": worker.pid if worker else None,
        "info": vars(worker.info) if worker and worker.info else None,
        "gpus": [f"{one['index']}: {one['name']}" for one in devices_of(worker)] if worker else [],
    }


def figures(seats: Sequence[Seat]) -> dict[str, JsonValue]:
    """Returns mean use, total memory and peak temperature of each worker's GPUs, by worker."""
    found: dict[str, JsonValue] = {}
    for seat in seats:
        devices = devices_of(seat.worker) if seat.worker else []
        use = _values(devices, "utilization_percent")
        if devices:
            found[seat.name] = {
                "use": sum(use) / len(use) if use else None,
                "used_mb": sum(_values(devices, "used_memory_mb")),
                "total_mb": sum(_values(devices, "total_memory_mb")),
                "celsius": max(_values(devices, "temperature_c"), default=None),
            }
    return found


def mean_use(workers: Sequence[WorkerRecord]) -> int | None:
    """Returns the mean use of all GPUs in percent; None if no GPU reports its use."""
    gpus = {
        (worker.host, device.get("index")): device
        for worker in workers
        for device in devices_of(worker)
    }
    use = _values(list(gpus.values()), "utilization_percent")
    return round(sum(use) / len(use)) if use else None


def _values(devices: Sequence[Mapping[str, Any]], sensor: str) -> list[int]:
    return [device[sensor] for device in devices if device.get(sensor) is not None]


def devices_of(worker: WorkerRecord) -> list[Mapping[str, Any]]:
    """Returns the records of the GPUs that a worker is pinned to, or of all its machine's GPUs."""
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
    """Returns a sort key that compares the numbers in a name, so that gpu10 follows gpu9."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
