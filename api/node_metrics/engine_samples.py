"""Extracts the samples that the network's schema v1 lists from the metrics of a vLLM engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import NamedTuple

from api.node_metrics.families import ENGINE

_FAMILIES = {family.name for family in ENGINE}
_HISTOGRAMS = [family.name for family in ENGINE if family.kind == "histogram"]
_NAMES = {name: family.name for family in ENGINE for name in family.sample_names}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_BOUND = re.compile(r'\ble="([^"]*)"')
# Values that labels can keep: numbers and words, but no path, host, address or port.
_HARMLESS = re.compile(
    r"[A-Za-z_][\w-]*|[+-]?(\d+(\.\d+)?(e[+-]?\d+)?|Inf)|\[\]", re.ASCII | re.IGNORECASE
)
# Labels that are removed: the engine's number in its server, and those that page.py adds.
_DROPPED = {"engine", "model_name", "replica"}
# A name on the hub, or a name without a folder.
_SERVED = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


class Series(NamedTuple):
    """A time series of an engine's metrics, without its labels `model_name` and `replica`."""

    family: str
    name: str  # the family's name, with a histogram's suffix
    labels: str
    place: int  # index of its value in EngineSamples.values
    bound: str | None  # upper bound of a histogram's bucket


@dataclass(frozen=True, eq=False)
class Shape:
    """The time series that an engine reports, without their values."""

    series: tuple[Series, ...]

    @cached_property
    def n_buckets(self) -> int:
        return sum(one.bound is not None for one in self.series)


@dataclass(frozen=True)
class EngineSamples:
    shape: Shape
    values: tuple[str, ...]


def samples_of(text: str) -> EngineSamples:
    """Parses an engine's metrics, in Prometheus' text format, to series of schema v1.

    If two engines behind one server report the same series, keeps only that of the first engine.
    """
    heads, values = [], []
    # By family: most are not in the schema, and parsing them would take most of the time.
    for block in text.split("# HELP ")[1:]:
        if block[: block.find(" ")] in _FAMILIES:
            for line in block.splitlines():
                head, _, value = line.rpartition(" ")
                heads.append(head)
                values.append(value)
    return EngineSamples(_shape(tuple(heads)), tuple(values))


@lru_cache(maxsize=256)
def _shape(heads: tuple[str, ...]) -> Shape:
    """Parses sample lines that lack their values. Cached, because only values change."""
    found: dict[tuple[str, str], Series] = {}
    for place, head in enumerate(heads):
        name, _, named = head.partition("{")
        if name in _NAMES:
            bound = _BOUND.search(named) if name.endswith("_bucket") else None
            kept = _harmless_labels(named)
            one = Series(_NAMES[name], name, kept, place, None if bound is None else bound[1])
            found.setdefault((name, kept), one)
    return Shape(tuple(found.values()))


def shown_name(model: str) -> str:
    """Returns a model's name for the metrics. Only the last part of a path is shown (privacy)."""
    if _SERVED.fullmatch(model) and not model.startswith((".", "~")):
        return model
    return re.sub(r"[^\w.-]", "_", PurePath(model).name, flags=re.ASCII)


def _harmless_labels(named: str) -> str:
    """Returns a sample's labels as text. Values that could be private become empty."""
    kept = {name: value for name, value in _LABEL.findall(named) if name not in _DROPPED}
    return ",".join(
        f'{name}="{value if _HARMLESS.fullmatch(value) else ""}"' for name, value in kept.items()
    )


def thinned(engines: Sequence[Shape], most_series: int) -> dict[Shape, tuple[Series, ...]]:
    """Chooses the series to report, if possible at most `most_series` for all engines together.
    Returns the chosen series of each `Shape`.

    If there are too many series, cumulative histogram buckets are removed: all engines keep the
    same evenly chosen bounds, including +Inf, so that sums over engines stay correct.
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
    """Returns at most `n` of the bounds, evenly spaced and including the last bound."""
    step = -(-len(bounds) // n)
    return set(bounds[::-1][::step]) if bounds else set()
