"""The model matrix: every check of each family's tiny model on this machine (`make models`).

    python -m bench.families.matrix [--variants float32,bfloat16,fp8] [--jobs 4] [FAMILY ...]
    python -m bench.families.matrix --opinions  # only makes models and second opinions

Each engine has its own process, and a log in build/families. Exits with 1 if a family is neither
right nor refused with a sentence. After --opinions, build/families can be copied to a GPU host,
where the second opinions are not computed again.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.families import against_oracle
from bench.families.look import FOLDER, artifacts, look, options_of
from bench.families.make import families, make, text_config
from bench.harness.report import parser_of
from cli.machine.gpus import visible_gpus

# No CPU runs these, so they come first on a GPU, whose time may end before the matrix does.
_FOR_GPUS = (
    *("deepseek-v3.2", "glm-5", "deepseek-v4", "glm-5.3-flash", "kimi-linear", "minimax-m2"),
    *("qwen3-next", "qwen3.5", "kimi-k2.6", "deepseek-v3"),
)
# The reason in a log why a process of vLLM ended; the other processes' errors say nothing.
_CAUSE = re.compile(
    r"\b(\w*(?:Error|Exception): (?!Engine core init|Engine process failed|WorkerProc init).+)"
)
_CAUSE_LENGTH = 300
# As in `make test`: a small cache for chat, and no core that two engines would both use. DeepGEMM
# would warm up shapes that tiny models do not use.
_SMALL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}


def parser_for(
    text: str | None, results: str, variants: str, limit_s: float
) -> argparse.ArgumentParser:
    """Returns the options of a command that looks at families."""
    parser = parser_of(text)
    add = parser.add_argument
    names = ", ".join(families())
    add("families", nargs="*", metavar="FAMILY", help=f"of {names}; default: all")
    add("--variants", default=variants, help=f"default here: {variants}")
    jobs = 4 if visible_gpus() else 1
    add("--jobs", type=int, default=jobs, help="engines at a time")
    add("--limit", type=float, default=limit_s, help="seconds of one engine")
    add("--results", type=Path, default=FOLDER / results, help="all findings, as JSON")
    add("--one", action="store_true", help="in this process, as JSON")
    return parser


def main() -> None:
    on_gpu = bool(visible_gpus())
    variants = "bfloat16,fp8,flashmla,decode" if on_gpu else "float32,bfloat16,fp8,decode"
    parser = parser_for(__doc__, "results.json", variants, 300.0)
    parser.add_argument("--opinions", action="store_true", help="make models and second opinions")
    given = parser.parse_args()
    first = _FOR_GPUS if on_gpu else ()
    wanted = given.families or [*first, *(name for name in families() if name not in first)]
    pairs = [
        (family, variant)
        for family in wanted
        for variant in (given.variants or variants).split(",")
        if variant != "flashmla" or "kv_lora_rank" in text_config(family)
    ]
    if given.opinions:
        for pair in pairs:
            make_opinion(*pair)
    elif given.one:
        print(json.dumps(look(wanted[0], given.variants, on_gpu)), flush=True)
    else:
        run(pairs, given, "matrix", lambda family: make(family, FOLDER))


def make_opinion(family: str, variant: str) -> None:
    """Makes the tiny model and the second opinion of a variant, without an engine of vLLM's."""
    began = time.monotonic()
    try:
        if variant == "decode":
            against_oracle.opinions(family, str(against_oracle.model(family, FOLDER)))
        else:
            artifacts(options_of(family, variant, on_gpu=True), family)
        word = "kept"
    except Exception as error:  # a model that this release of transformers does not have
        word = f"none ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    print(f"{family:14} {variant:9} {word}, {time.monotonic() - began:.0f} s", flush=True)


def run(
    pairs: Sequence[tuple[str, str]],
    given: argparse.Namespace,
    module: str,
    prepare: Callable[[str], object],
) -> None:
    """Looks at families and variants, each in a process of `module`, and exits.

    Prints a line for each, and writes all findings to the file of results. `prepare` makes a
    family's model before several processes would do so at the same time.
    """
    rows: list[dict[str, Any]] = []
    given.results.parent.mkdir(parents=True, exist_ok=True)
    for family in dict.fromkeys(family for family, _ in pairs):
        with suppress(Exception):  # reported by the family's own process
            prepare(family)
    with ThreadPoolExecutor(given.jobs) as pool:
        waiting = {pool.submit(in_a_process, *pair, given.limit, module): pair for pair in pairs}
        for done in as_completed(waiting):
            family, variant = waiting[done]
            seen = done.result()
            words = ", ".join(f"{name} {value}" for name, value in seen.items() if name != "right")
            mark = "WRONG" if not seen["right"] else "refused" if "refused" in seen else "right"
            print(f"{mark:7} {family:14} {variant:9} {words}", flush=True)
            rows.append({"family": family, "variant": variant, **seen})
            given.results.write_text(json.dumps(rows, indent=1))
    wrong = sum(not row["right"] for row in rows)
    print(f"{wrong} wrong of {len(rows)}")
    sys.exit(bool(wrong))


def in_a_process(family: str, variant: str, limit_s: float, module: str) -> dict[str, Any]:
    """Looks at one variant in a process of `module`, whose crash or timeout is a finding too."""
    command = [sys.executable, "-m", f"bench.families.{module}", "--one"]
    log = FOLDER / f"{family}-{variant}{'' if module == 'matrix' else f'-{module}'}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--variants", variant, family],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_SMALL | {**os.environ},
            process_group=0,
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"right": False, "error": f"not done within {limit_s:g} s, see {log}"}
        finally:  # vLLM's processes would keep the pipe open and a GPU's memory in use
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with log.open("ab") as written:
        written.write(said)  # vLLM's processes write to stdout
    took = {"seconds": round(time.monotonic() - began)}
    lines = [line for line in said.decode(errors="replace").splitlines() if line.startswith("{")]
    if not lines:
        error = f"it ended with {process.returncode}, see {log}"
        return {"right": False, "error": error, **cause(log), **took}
    seen: dict[str, Any] = json.loads(lines[-1])
    return seen | (cause(log) if "root cause above" in seen.get("refused", "") else {}) | took


def cause(log: Path) -> dict[str, str]:
    """Returns the last error in a log, if there is one."""
    found = _CAUSE.findall(log.read_text(errors="replace"))
    return {"cause": found[-1][:_CAUSE_LENGTH]} if found else {}


if __name__ == "__main__":
    main()
