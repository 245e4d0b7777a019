"""Fewer buckets of histograms, so that many engines fit into what the network's reader takes.

A bucket counts all that is below its bound, so a histogram without some of them is right, and
coarser. All engines keep the same bounds, so that their sums stay right too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from api.node_metrics.exposition import Sample, Samples
from api.node_metrics.families import ENGINE

_BOUND = re.compile(r'\ble="([^"]*)"')
_HISTOGRAMS = [family.name for family in ENGINE if family.kind == "histogram"]


def thinned(engines: Sequence[Samples], most_series: int) -> list[Samples]:
    """The engines with evenly chosen bounds of each histogram, as many as fit; +Inf always."""
    n_buckets = sum(_is_bucket(sample) for engine in engines for sample in _all(engine))
    others = sum(len(samples) for engine in engines for samples in engine.values()) - n_buckets
    if n_buckets + others <= most_series:
        return list(engines)
    # +Inf is one of them; where not even that fits, `exposition.text` leaves families out.
    n_bounds = max(1, (most_series - others) // max(1, len(engines) * len(_HISTOGRAMS)))
    kept = {family: _evenly(_bounds(engines, family), n_bounds) for family in _HISTOGRAMS}
    return [
        {
            family: [
                one for one in samples if not _is_bucket(one) or _bound(one.labels) in kept[family]
            ]
            for family, samples in engine.items()
        }
        for engine in engines
    ]


def _all(engine: Samples) -> Iterable[Sample]:
    return (sample for samples in engine.values() for sample in samples)


def _is_bucket(sample: Sample) -> bool:
    return sample.name.endswith("_bucket")


@lru_cache(maxsize=4096)
def _bound(labels: str) -> str:
    """A label's bound; cached, as engines of one model repeat the same ones each scrape."""
    found = _BOUND.search(labels)
    return found[1] if found else ""


def _bounds(engines: Sequence[Samples], family: str) -> list[str]:
    found = {
        _bound(one.labels)
        for engine in engines
        for one in engine.get(family, ())
        if _is_bucket(one)
    }
    return sorted(found, key=float)


def _evenly(bounds: list[str], n: int) -> set[str]:
    """The last of `bounds` and n - 1 others."""
    step = -(-len(bounds) // n)
    return set(bounds[::-1][::step]) if bounds else set()
