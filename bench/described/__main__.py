"""Requests made from the API's own description, against a real node with synthetic engines.

    .venv/bin/python -m bench.described --cases 10000          # what `make fuzz` does
    .venv/bin/python -m bench.described --keys                 # that too
    .venv/bin/python -m bench.described --in-process --seed 7 # in this process: more situations, no
    engines

An answer that is not described, or a 5xx other than 503 with Retry-After, ends it with the request
that got it.
"""

import argparse
import logging
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from bench.described.node import Node
from bench.described.requests import Target, ask_all
from bench.described.stack import RealNode

# An operation that takes nothing is asked once a turn and situation, however many cases there shall
# be.
_CASES_A_TURN = 40


def campaign(target: Target, n_cases: int, seed: int, until: float) -> dict[str, Counter[int]]:
    """How often each operation answered with each status. Ends after `n_cases`, or at the time
    `until`.
    """
    seen: dict[str, Counter[int]] = {}
    while (
        sum(statuses.total() for statuses in seen.values()) < n_cases and time.monotonic() < until
    ):
        for label, statuses in ask_all(target, _CASES_A_TURN, seed).items():
            seen.setdefault(label, Counter()).update(statuses)
        seed += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="over all operations")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="at most, and the turn that has begun"
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="the API alone, in front of a Redis in this process",
    )
    parser.add_argument(
        "--keys", action="store_true", help="a node that wants keys, asked with each kind and none"
    )
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    with ExitStack() as exits:
        folder = Path(
            exits.enter_context(tempfile.TemporaryDirectory(prefix="proofline-described-"))
        )
        target: Target = (
            Node(folder)
            if options.in_process
            else exits.enter_context(RealNode(folder, wants_keys=options.keys))
        )
        began = time.monotonic()
        seen = campaign(target, options.cases, options.seed, began + 60 * options.minutes)
        took_s = time.monotonic() - began
    for label, statuses in seen.items():
        print(f"{label:<50}", "  ".join(f"{status}: {n}" for status, n in sorted(statuses.items())))
    n = sum(statuses.total() for statuses in seen.values())
    print(f"seed {options.seed}: {n} requests in {took_s:.0f} s, every answer as described")


if __name__ == "__main__":
    main()
