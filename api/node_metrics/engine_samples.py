"""An engine's samples of schema v1, from the metrics of its vLLM."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath

from api.node_metrics.exposition import Sample, Samples, labels
from api.node_metrics.families import ENGINE

_FAMILIES = {family.name for family in ENGINE}
_NAMES = {name for family in ENGINE for name in family.sample_names}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Allowed in labels: numbers and words, but no path, host, address or port.
_HARMLESS = re.compile(
    r"[A-Za-z_][\w-]*|[+-]?(\d+(\.\d+)?(e[+-]?\d+)?|Inf)|\[\]", re.ASCII | re.IGNORECASE
)
# An engine's number within its server, and labels that are set anew for the whole node.
_DROPPED = {"engine", "model_name", "replica"}
# A name on the hub, or one without a folder.
_SERVED = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def samples_of(text: str) -> Samples:
    """An engine's samples by family, without the node's labels (`as_replica`).

    A second engine behind the same server would give the same series, and is left out.
    """
    found: Samples = {}
    # By family: most are not in the schema, and parsing their lines would take most of the time.
    for block in text.split("# HELP ")[1:]:
        family = block.partition(" ")[0]
        if family in _FAMILIES:
            found[family] = _samples(block)
    return found


def _samples(block: str) -> list[Sample]:
    found: dict[tuple[str, str], Sample] = {}
    for line in block.splitlines():
        name, _, rest = line.partition("{")
        if name in _NAMES:
            named, _, value = rest.rpartition("} ")
            kept = _kept(named)
            found.setdefault((name, kept), Sample(name, kept, value))
    return list(found.values())


def as_replica(model: str, replica: int) -> str:
    """The labels that every sample of an engine has."""
    return labels(model_name=shown_name(model), replica=replica)


def shown_name(model: str) -> str:
    """What clients call the model; the last part of a path, which only the node's hosts know."""
    if _SERVED.fullmatch(model) and not model.startswith((".", "~")):
        return model
    return re.sub(r"[^\w.-]", "_", PurePath(model).name, flags=re.ASCII)


@lru_cache(maxsize=4096)
def _kept(named: str) -> str:
    """Labels that may be shown; cached, as engines of one model repeat the same ones."""
    kept = {name: value for name, value in _LABEL.findall(named) if name not in _DROPPED}
    return ",".join(
        f'{name}="{value if _HARMLESS.fullmatch(value) else ""}"' for name, value in kept.items()
    )
