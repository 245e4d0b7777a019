"""Info samples: versions of the schema and of Proofline, and engine settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.node_metrics.engine_samples import shown_name
from api.node_metrics.exposition import Lines, labels, line
from api.node_metrics.families import CONFIG, SCHEMA, VERSION
from api.version import VERSION as OURS
from poc_core.records import WorkerRecord
from poc_core.serving.deployments import DeploymentStatus

SCHEMA_VERSION = "1"


def about(deployment: DeploymentStatus, engines: Sequence[WorkerRecord]) -> Lines:
    """Returns the samples; `engines`: the ready engines.

    Each model has a line, so there are two lines during an upgrade.
    """
    lines: Lines = {
        SCHEMA.name: [line(SCHEMA.name, labels(version=SCHEMA_VERSION), "1")],
        VERSION.name: [line(VERSION.name, labels(version=OURS), "1")],
    }
    for model in sorted({engine.model for engine in engines}):
        of_model = [engine for engine in engines if engine.model == model]
        lines.setdefault(CONFIG.name, []).append(_config(deployment, of_model))
    return lines


def _config(deployment: DeploymentStatus, engines: Sequence[WorkerRecord]) -> str:
    """Returns one model's settings: actual limits and dtype, requested parallelism."""
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
