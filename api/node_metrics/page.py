"""Renders the answer of /api/v1/metrics, once for all concurrent requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anyio import to_thread

from api.node_metrics import exposition
from api.node_metrics.engine_samples import shown_name, thinned
from api.node_metrics.engines import Ask, EngineReadings, Reading
from api.node_metrics.exposition import Lines, labels, line, number
from api.node_metrics.families import CONFIG, READ_AT, RELEASE, SCHEMA
from api.node_metrics.machines import CpuShares, machine_samples
from api.version import VERSION
from poc_core.machine_figures import MachineFigures
from poc_core.records import WorkerRecord
from poc_core.serving.deployments import DeploymentStatus

# Seconds for which an answer is reused for further requests.
FRESH_S = 1.0
_SCHEMA_VERSION = "1"


class Node(NamedTuple):
    """The node's workers, machines and deployment, as read from Redis at one moment."""

    workers: Sequence[WorkerRecord]  # workers with a heartbeat
    machines: Sequence[MachineFigures]
    deployment: DeploymentStatus


class Page:
    """Renders and caches the answer of /api/v1/metrics. Runs on one event loop."""

    def __init__(self, look: Callable[[], Node], ask: Ask, fresh_s: float = FRESH_S) -> None:
        """`look`: reads the node's records from Redis, in a thread. `ask`: fetches metrics."""
        self._look = look
        self._readings = EngineReadings(ask)
        self._cpu = CpuShares()
        self._fresh_s = fresh_s
        self._text = b""
        self._made_at = -math.inf
        self._making: asyncio.Task[None] | None = None

    async def text(self) -> bytes:
        """Returns the metrics as text, at most `fresh_s` seconds old. Raises RedisError if Redis
        does not answer.
        """
        if time.monotonic() - self._made_at > self._fresh_s:
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make())
            # Shielded: requests share this task and its error, so no request may cancel the task.
            await asyncio.shield(self._making)
        return self._text

    def close(self) -> None:
        self._readings.close()

    async def _make(self) -> None:
        node = await to_thread.run_sync(self._look)
        # A hung engine is shown with its last values.
        shown = [one for one in node.workers if one.is_ready or one.state == "hung"]
        readings = await self._readings.read([one for one in shown if one.port])
        self._text = await to_thread.run_sync(_rendered, node, readings, self._cpu)
        self._made_at = time.monotonic()


def _rendered(node: Node, readings: Mapping[str, Reading], cpu: CpuShares) -> bytes:
    lines = _about(node.deployment, [one for one in node.workers if one.is_ready])
    for name, found in machine_samples(node.machines, cpu).items():
        lines.setdefault(name, []).extend(found)
    numbers = _numbers(node)
    read = [
        (numbers[worker.id], worker, readings[worker.id])
        for worker in node.workers
        if worker.id in readings
    ]
    for index, worker, reading in read:
        source = labels(source="vllm", replica=index)
        at = number(_data_from(worker, reading))
        lines.setdefault(READ_AT.name, []).append(line(READ_AT.name, source, at))
    room = exposition.MOST_SERIES - sum(map(len, lines.values()))
    shown = thinned([reading.samples.shape for _, _, reading in read], room)
    for index, worker, reading in read:
        replica = labels(model_name=shown_name(worker.model), replica=index)
        for family, name, kept, place, _ in shown[reading.samples.shape]:
            named = f"{replica},{kept}" if kept else replica
            lines.setdefault(family, []).append(line(name, named, reading.samples.values[place]))
    return exposition.text(lines).encode()


def _numbers(node: Node) -> dict[str, int]:
    """Returns each worker's number among all workers, by host and GPU. A worker that has ended
    counts too, because its number must not go to another worker before it is started again.
    """
    names = Counter(worker.name for worker in node.workers)
    hosts = (host for host in node.deployment.hosts if not host.follows)
    ended = Counter(place.name for host in hosts for place in host.places) - names
    order = [(worker.name, worker.id) for worker in node.workers]
    order += [(name, "") for name in ended.elements()]
    return {worker_id: number for number, (_, worker_id) in enumerate(sorted(order))}


def _data_from(worker: WorkerRecord, reading: Reading) -> float:
    """Returns the Unix time of an engine's metrics. For a hung engine: of its last progress."""
    since = worker.stats.get("engine_still_since")
    return min(reading.at, float(since)) if isinstance(since, int | float) else reading.at


def _about(deployment: DeploymentStatus, engines: Sequence[WorkerRecord]) -> Lines:
    """Returns the samples about versions (schema, release) and about each model's settings."""
    lines: Lines = {
        SCHEMA.name: [line(SCHEMA.name, labels(version=_SCHEMA_VERSION), "1")],
        RELEASE.name: [line(RELEASE.name, labels(version=VERSION), "1")],
    }
    for model in sorted({engine.model for engine in engines}):
        of_model = [engine for engine in engines if engine.model == model]
        lines.setdefault(CONFIG.name, []).append(_config(deployment, of_model))
    return lines


def _config(deployment: DeploymentStatus, engines: Sequence[WorkerRecord]) -> str:
    """Returns the sample with a model's settings, from its first engine and the deployment."""
    model, info = engines[0].model, engines[0].info
    has_limits = info is not None and engines[0].engine == "vllm"
    wanted: dict[str, Any] = {}  # explicitly requested values; a host's defaults may differ
    if deployment.wanted is not None and deployment.wanted.name == model:
        wanted = deployment.wanted.model_dump(exclude_unset=True)
    named = labels(
        model_name=shown_name(model),
        dtype=info.dtype if info is not None else "",
        replicas=len(engines),
        max_num_seqs=info.max_sequences if info is not None and has_limits else "",
        max_model_len=info.max_seq_len if info is not None and has_limits else "",
        tensor_parallel_size=wanted.get("tensor_parallel", ""),
        pipeline_parallel_size=wanted.get("pipeline_parallel", ""),
    )
    return line(CONFIG.name, named, "1")
