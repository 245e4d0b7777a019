"""An engine's samples of schema v1, out of what its vLLM tells of itself."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath

from api.node_metrics.exposition import Sample, Samples, labels
from api.node_metrics.families import ENGINE

_FAMILIES = {family.name for family in ENGINE}
_NAMES = {name for family in ENGINE for name in family.sample_names}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# What vLLM's labels may say: numbers and words. A path, a host's name, an address or a port is
# neither.
_HARMLESS = re.compile(
    r"[A-Za-z_][\w-]*|[+-]?(\d+(\.\d+)?(e[+-]?\d+)?|Inf)|\[\]", re.ASCII | re.IGNORECASE
)
# The number of an engine within its server, and what is said anew for the whole node.
_DROPPED = {"engine", "model_name", "replica"}
# Of a name on the hub, or one without a folder.
_SERVED = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def samples_of(text: str) -> Samples:
    """By family, without the labels that only the node knows (see as_replica). Those of a second
    engine behind the same server would be the same series, and are left out."""
    found: Samples = {}
    # Family by family: most are none of the schema's, and looking at their lines would be most of
    # the time.
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
    """What clients call the model; of a path, which only the node's hosts know, its last part."""
    if _SERVED.fullmatch(model) and not model.startswith((".", "~")):
        return model
    return re.sub(r"[^\w.-]", "_", PurePath(model).name, flags=re.ASCII)


@lru_cache(maxsize=4096)
def _kept(named: str) -> str:
    """Engines of one model have the same labels, scrape after scrape."""
    kept = {name: value for name, value in _LABEL.findall(named) if name not in _DROPPED}
    return ",".join(
        f'{name}="{value if _HARMLESS.fullmatch(value) else ""}"' for name, value in kept.items()
    )
