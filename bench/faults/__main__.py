"""python -m bench.faults: see `make faults` and `make soak`."""

import argparse
import sys
import time

from bench.faults.campaign import run
from bench.faults.faults import FAULTS
from bench.faults.work import printed_at


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=20.0, help="how long faults are done (20)")
    add("--seed", type=int, default=int(time.time()), help="draws the faults; default: the time")
    add("--engine", choices=("synthetic", "vllm"), default="synthetic", help="of both workers")
    add("--no-faults", action="store_true", help="only work, and whether anything grows")
    add("--pause", type=float, help="mean seconds between two faults (2; 20 with --engine vllm)")
    names = sorted({fault.__name__ for fault in FAULTS})
    add("--only", action="append", choices=names, help="draw only from these faults")
    tls = "to Redis, to receivers and in front of the API; without faults"
    add("--tls", action="store_true", help=tls)
    given = parser.parse_args()
    # vLLM's engine takes longer to restart than a synthetic one: no second fault before.
    pause_s = {"synthetic": 2.0, "vllm": 20.0}[given.engine] if given.pause is None else given.pause
    kinds = [one for one in FAULTS if not given.only or one.__name__ in given.only]
    if given.no_faults or given.tls:
        kinds = []
    report = run(given.minutes, given.seed, given.engine, kinds, pause_s, printed_at, given.tls)
    print(report.text())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
