"""Reduces histogram buckets, so that many engines fit into the limits of the network's reader.

A bucket is cumulative, so a histogram with fewer buckets is correct but coarser. All engines keep
the same bounds, so that their sums stay correct too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from api.node_metrics.engine_samples import Series, Shape
from api.node_metrics.families import ENGINE

_HISTOGRAMS = [family.name for family in ENGINE if family.kind == "histogram"]


def thinned(engines: Sequence[Shape], most_series: int) -> dict[Shape, tuple[Series, ...]]:
    """Returns each shape's series, with evenly chosen bounds of each histogram, including +Inf.

    Keeps as many bounds as fit into `most_series`. Many engines have the same shape.
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
    """Returns the last of `bounds` and n - 1 others, evenly spaced."""
    step = -(-len(bounds) // n)
    return set(bounds[::-1][::step]) if bounds else set()
