"""An engine's samples of schema v1, read from the metrics of its vLLM.

Engines of one model report the same series each time with other values, so the series are parsed
only once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import NamedTuple

from api.node_metrics.exposition import labels
from api.node_metrics.families import ENGINE

_FAMILIES = {family.name for family in ENGINE}
_HISTOGRAMS = [family.name for family in ENGINE if family.kind == "histogram"]
_NAMES = {name: family.name for family in ENGINE for name in family.sample_names}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BOUND = re.compile(r'\ble="([^"]*)"')
# Allowed in labels: numbers and words, but no path, host, address or port.
_HARMLESS = re.compile(
    r"[A-Za-z_][\w-]*|[+-]?(\d+(\.\d+)?(e[+-]?\d+)?|Inf)|\[\]", re.ASCII | re.IGNORECASE
)
# The engine's number within its server, and labels that are set for the complete node.
_DROPPED = {"engine", "model_name", "replica"}
# A name on the hub, or a name without a folder.
_SERVED = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


class Series(NamedTuple):
    """One series of an engine's metrics, without the node's labels (`as_replica`)."""

    family: str
    name: str  # the family's name, with a histogram's suffix
    labels: str
    place: int  # index of its value
    bound: str | None  # upper bound of a histogram's bucket


@dataclass(frozen=True, eq=False)
class Shape:
    """The set of series of an engine."""

    series: tuple[Series, ...]

    @cached_property
    def n_buckets(self) -> int:
        return sum(one.bound is not None for one in self.series)


@dataclass(frozen=True)
class EngineSamples:
    shape: Shape
    values: tuple[str, ...]


def samples_of(text: str) -> EngineSamples:
    """Returns those series of an engine that are in the schema, and their values.

    Of two engines behind one server, which have the same series, only the first counts.
    """
    heads, values = [], []
    # Split by family: most families are not in the schema, and parsing their lines would take most
    # of the time.
    for block in text.split("# HELP ")[1:]:
        if block[: block.find(" ")] in _FAMILIES:
            for line in block.splitlines():
                head, _, value = line.rpartition(" ")
                heads.append(head)
                values.append(value)
    return EngineSamples(_shape(tuple(heads)), tuple(values))


@lru_cache(maxsize=256)
def _shape(heads: tuple[str, ...]) -> Shape:
    """Returns an engine's shape. `heads`: its lines without their values."""
    found: dict[tuple[str, str], Series] = {}
    for place, head in enumerate(heads):
        name, _, named = head.partition("{")
        if name in _NAMES:
            bound = _BOUND.search(named) if name.endswith("_bucket") else None
            kept = _harmless_labels(named)
            one = Series(_NAMES[name], name, kept, place, None if bound is None else bound[1])
            found.setdefault((name, kept), one)
    return Shape(tuple(found.values()))


def as_replica(model: str, replica: int) -> str:
    """Returns the labels that every sample of an engine has."""
    return labels(model_name=shown_name(model), replica=replica)


def shown_name(model: str) -> str:
    """Returns the model's public name: of a path only the last part, because the path is
    private.
    """
    if _SERVED.fullmatch(model) and not model.startswith((".", "~")):
        return model
    return re.sub(r"[^\w.-]", "_", PurePath(model).name, flags=re.ASCII)


def _harmless_labels(named: str) -> str:
    """Returns labels without those that are private, and without private values."""
    kept = {name: value for name, value in _LABEL.findall(named) if name not in _DROPPED}
    return ",".join(
        f'{name}="{value if _HARMLESS.fullmatch(value) else ""}"' for name, value in kept.items()
    )


def thinned(engines: Sequence[Shape], most_series: int) -> dict[Shape, tuple[Series, ...]]:
    """Returns each shape's series, with fewer histogram buckets if there are too many series.

    A bucket is cumulative, so a histogram with fewer buckets is correct but coarser. All engines
    keep the same bounds, including +Inf, so that sums over engines stay correct. Keeps as many
    evenly chosen bounds as fit into `most_series`.
    """
    n_buckets = sum(shape.n_buckets for shape in engines)
    others = sum(len(shape.series) for shape in engines) - n_buckets
    shapes = set(engines)
    if n_buckets + others <= most_series:
        return {shape: shape.series for shape in shapes}
    # +Inf is one of the bounds; if even +Inf does not fit, `exposition.text` omits families.
    n_bounds = max(1, (most_series - others) // max(1, len(engines) * len(_HISTOGRAMS)))
    kept = {family: _evenly(_bounds(shapes, family), n_bounds) for family in _HISTOGRAMS}
    return {
        shape: tuple(
            one for one in shape.series if one.bound is None or one.bound in kept[one.family]
        )
        for shape in shapes
    }


def _bounds(shapes: Iterable[Shape], family: str) -> list[str]:
    found = {
        one.bound
        for shape in shapes
        for one in shape.series
        if one.family == family and one.bound is not None
    }
    return sorted(found, key=float)


def _evenly(bounds: list[str], n: int) -> set[str]:
    """Returns at most `n` evenly spaced bounds, including the last."""
    step = -(-len(bounds) // n)
    return set(bounds[::-1][::step]) if bounds else set()
