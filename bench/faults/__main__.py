"""python -m bench.faults: see `make faults` and `make soak`."""

import argparse
import sys
import time

from bench.faults.campaign import run
from bench.faults.faults import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults are done (20)")
    parser.add_argument(
        "--seed", type=int, default=None, help="draws the faults; of the clock, unless given"
    )
    parser.add_argument(
        "--engine", choices=("synthetic", "vllm"), default="synthetic", help="of both workers"
    )
    parser.add_argument(
        "--no-faults", action="store_true", help="only work, and whether anything grows"
    )
    parser.add_argument(
        "--pause",
        type=float,
        help="seconds between two faults, on average (2; 20 with --engine vllm)",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted({fault.__name__ for fault in FAULTS}),
        help="draw from these faults alone",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="to Redis, to receivers and before the API; without faults",
    )
    given = parser.parse_args()
    # vLLM's engine takes longer to come back than a synthetic one: no second fault before.
    pause_s = {"synthetic": 2.0, "vllm": 20.0}[given.engine] if given.pause is None else given.pause
    seed = int(time.time()) if given.seed is None else given.seed
    log = lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: E731
    kinds = [one for one in FAULTS if not given.only or one.__name__ in given.only]
    if given.no_faults or given.tls:
        kinds = []
    report = run(given.minutes, seed, given.engine, kinds, pause_s, log, given.tls)
    print(report.text())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
