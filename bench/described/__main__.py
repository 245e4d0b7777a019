"""Requests generated from the API's OpenAPI document, to a real node with synthetic engines.

    .venv/bin/python -m bench.described --cases 10000         # as `make fuzz` does
    .venv/bin/python -m bench.described --keys                # the same with keys
    .venv/bin/python -m bench.described --in-process --seed 7 # more situations, but no engines

Fails at the first answer that the document does not describe, or that is a 5xx other than 503 with
Retry-After.
"""

import logging
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from bench.described.node import Node
from bench.described.requests import Target, ask_all
from bench.described.stack import RealNode
from bench.harness.report import parser_of

# An operation without parameters gets one case a turn and situation.
_CASES_A_TURN = 40


def campaign(target: Target, n_cases: int, seed: int, until: float) -> dict[str, Counter[int]]:
    """Sends `n_cases` requests until the time `until`; counts the statuses of each operation."""
    seen: dict[str, Counter[int]] = {}
    while (
        sum(statuses.total() for statuses in seen.values()) < n_cases and time.monotonic() < until
    ):
        for label, statuses in ask_all(target, _CASES_A_TURN, seed).items():
            seen.setdefault(label, Counter()).update(statuses)
        seed += 1
    return seen


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--cases", type=int, default=10_000, help="over all operations")
    add("--seed", type=int, default=int(time.time()))
    add("--minutes", type=float, default=60.0, help="at most, and the turn that has begun")
    add("--in-process", action="store_true", help="only the API, with a Redis in this process")
    add("--keys", action="store_true", help="a node that requires keys; each kind, and none")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    with ExitStack() as exits:
        temporary = tempfile.TemporaryDirectory(prefix="proofline-described-")
        folder = Path(exits.enter_context(temporary))
        target: Target = Node(folder)
        if not options.in_process:
            target = exits.enter_context(RealNode(folder, wants_keys=options.keys))
        began = time.monotonic()
        seen = campaign(target, options.cases, options.seed, began + 60 * options.minutes)
        took_s = time.monotonic() - began
    for label, statuses in seen.items():
        print(f"{label:<50}", "  ".join(f"{status}: {n}" for status, n in sorted(statuses.items())))
    n = sum(statuses.total() for statuses in seen.values())
    print(f"seed {options.seed}: {n} requests in {took_s:.0f} s, every answer as described")


if __name__ == "__main__":
    main()
