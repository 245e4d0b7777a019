"""Formats the last sensor readings of the node's GPUs and hosts as Prometheus samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from api.node_metrics.exposition import Lines, labels, line, number
from api.node_metrics.families import GPU, HOST, READ_AT, XID_EVENTS, Family
from poc_core.machine_figures import CpuTimes, GpuFigures, MachineFigures


class CpuShares:
    """Computes each host's CPU use between two scrapes. The first scrape has no CPU use."""

    def __init__(self) -> None:
        self._times: dict[str, CpuTimes] = {}  # by host, at the last scrape
        self._shares: dict[str, dict[str, float]] = {}

    def since_last(self, machine: MachineFigures) -> dict[str, float]:
        """Returns the host's shares (0 to 1) of busy and stolen CPU time since its previous report.

        Returns {} for the first report, and the same shares again until the host reports again.
        """
        now, before = machine.cpu, self._times.get(machine.host)
        if now is None or before == now:
            return self._shares.get(machine.host, {})
        self._times[machine.host], shares = now, {}
        if before is not None and now.all > before.all:  # otherwise the host was rebooted
            passed = now.all - before.all
            shares = {
                "cpu_busy_ratio": (now.busy - before.busy) / passed,
                "cpu_steal_ratio": (now.steal - before.steal) / passed,
            }
        self._shares[machine.host] = shares
        return shares


def machine_samples(machines: Sequence[MachineFigures], cpu: CpuShares) -> Lines:
    """Returns the samples of all hosts and GPUs, with indices instead of their private names."""
    lines: Lines = {}
    gpus: dict[str, tuple[int, GpuFigures]] = {}
    for index, machine in enumerate(machines):
        numbered = {"host_index": index} if len(machines) > 1 else {}
        told = {**machine.sensors, **cpu.since_last(machine)}
        _add(lines, HOST, "mlnode_host_", told, labels(**numbered))
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
