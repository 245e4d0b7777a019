"""Formats metrics in Prometheus' text format 0.0.4, within the network's limits."""

import logging
from collections.abc import Mapping, Sequence

from api.node_metrics.families import ALL

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4"
MOST_SERIES = 5000
MOST_BYTES = 2 * 1024 * 1024
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


# Name of a family of metrics -> its sample lines (`line`).
Lines = dict[str, list[str]]


def line(name: str, labels: str, value: str) -> str:
    """Formats a sample as a line. `labels`: the text between the braces."""
    return f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"


def labels(**named: str | int) -> str:
    """Formats labels as text without braces, in the order of the arguments. Escapes the values."""
    return ",".join(f'{name}="{str(value).translate(_ESCAPED)}"' for name, value in named.items())


def number(value: float) -> str:
    """Returns the shortest text that parses to the same number."""
    return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def text(lines: Mapping[str, Sequence[str]]) -> str:
    """Formats metric families in the order of families.ALL. Omits and logs any over the limits."""
    blocks: list[str] = []
    n_series = n_bytes = 0
    left_out: list[str] = []
    for family in ALL:
        found = lines.get(family.name, ())
        if not found:
            continue
        head = f"# HELP {family.name} {family.about}\n# TYPE {family.name} {family.kind}\n"
        block = head + "\n".join(found) + "\n"
        size = len(block.encode())
        if n_series + len(found) > MOST_SERIES or n_bytes + size > MOST_BYTES:
            left_out.append(family.name)
            continue
        n_series, n_bytes = n_series + len(found), n_bytes + size
        blocks.append(block)
    if left_out:
        log.warning("too many engines and GPUs for schema v1: left out are %s", ", ".join(left_out))
    return "".join(blocks)
