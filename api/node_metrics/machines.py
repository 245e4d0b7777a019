"""The last sensor readings of the node's GPUs and hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from api.node_metrics.exposition import Lines, labels, line, number
from api.node_metrics.families import GPU, HOST, READ_AT, XID_EVENTS, Family
from poc_core.machine_figures import GpuFigures, MachineFigures


def machine_samples(machines: Sequence[MachineFigures]) -> Lines:
    """Samples of all hosts. `gpu_index` counts their GPUs, each once, as /api/v1/gpu/devices does.

    Several hosts are told apart by a number, `host_index`: their names are nobody's business.
    """
    lines: Lines = {}
    gpus: dict[str, tuple[int, GpuFigures]] = {}
    for index, machine in enumerate(machines):
        numbered = {"host_index": index} if len(machines) > 1 else {}
        _add(lines, HOST, "mlnode_", machine.sensors, labels(**numbered))
        source = labels(source="host", **numbered)
        _append(lines, READ_AT.name, source, machine.read_at)
        if machine.gpus:
            _append(lines, READ_AT.name, labels(source="nvml", **numbered), machine.read_at)
        for gpu in machine.gpus:
            gpus.setdefault(gpu.uuid, (len(gpus), gpu))
    for index, gpu in gpus.values():
        _add(lines, GPU, "mlnode_gpu_", gpu.sensors, labels(gpu_index=index, gpu_model=gpu.model))
        for xid, n_events in sorted(gpu.xid_events.items()):
            _append(lines, XID_EVENTS.name, labels(gpu_index=index, xid=xid), n_events)
    return lines


def _add(
    lines: Lines, families: Sequence[Family], prefix: str, told: Mapping[str, float], named: str
) -> None:
    for family in families:
        if (value := told.get(family.name.removeprefix(prefix))) is not None:
            _append(lines, family.name, named, value)


def _append(lines: Lines, name: str, named: str, value: float) -> None:
    lines.setdefault(name, []).append(line(name, named, number(value)))
