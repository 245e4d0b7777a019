"""The model matrix: what holds of each family's tiny model, here. `make models` runs it.

    python -m bench.families.matrix [--variants float32,bfloat16,fp8] [--jobs 4] [FAMILY ...]

Each engine has a process of its own, and a log in build/families. What is neither right nor refused
with a sentence is wrong: exit code 1. docs/models.md keeps what was seen.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.families.look import FOLDER, VARIANTS, look
from bench.families.make import families, make, text_config
from cli.machine.gpus import visible_gpus

# What no CPU runs comes first on a GPU: its time may end before all families have had their turn.
_FOR_GPUS = (
    "deepseek-v3.2",
    "glm-5",
    "deepseek-v4",
    "glm-5.3-flash",
    "kimi-linear",
    "minimax-m2",
    "qwen3-next",
    "qwen3.5",
    "kimi-k2.6",
    "deepseek-v3",
)
# Where vLLM's processes write why one of them ended; what the others then say of it tells nothing.
_CAUSE = re.compile(
    r"\b(\w*(?:Error|Exception): (?!Engine core init|Engine process failed|WorkerProc init).+)"
)
_CAUSE_LENGTH = 300


def main() -> None:
    on_gpu = bool(visible_gpus())
    variants = ["bfloat16", "fp8", "flashmla"] if on_gpu else ["float32", "bfloat16", "fp8"]
    variants.append("decode")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"of {', '.join(families())}; default: all"
    )
    parser.add_argument(
        "--variants",
        default="",
        help=f"of {','.join(VARIANTS)}; default here: {','.join(variants)}",
    )
    parser.add_argument("--jobs", type=int, default=4 if on_gpu else 1, help="engines at a time")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds that one engine may take"
    )
    parser.add_argument(
        "--results", type=Path, default=FOLDER / "results.json", help="what was seen, as JSON"
    )
    parser.add_argument("--one", action="store_true", help="in this process, as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(look(options.families[0], options.variants, on_gpu)), flush=True)
        return
    wanted = options.families or in_turn(on_gpu)
    pairs = [
        (family, variant)
        for family in wanted
        for variant in (options.variants.split(",") if options.variants else variants)
        if variant != "flashmla" or "kv_lora_rank" in text_config(family)
    ]
    rows = run(pairs, options.jobs, options.limit, options.results)
    wrong = sum(not row["right"] for row in rows)
    print(f"{wrong} wrong of {len(rows)}")
    sys.exit(bool(wrong))


def in_turn(on_gpu: bool) -> list[str]:
    """All families, on a GPU those first that nothing else runs."""
    first = _FOR_GPUS if on_gpu else ()
    return [*first, *(name for name in families() if name not in first)]


def run(
    pairs: Sequence[tuple[str, str]], jobs: int, limit_s: float, results: Path
) -> list[dict[str, Any]]:
    """Looks at families and variants, `jobs` at a time; prints a line of each as soon as it is
    known, and keeps all that are known in the file `results`.
    """
    rows: list[dict[str, Any]] = []
    results.parent.mkdir(parents=True, exist_ok=True)
    for family in dict.fromkeys(family for family, variant in pairs if variant != "decode"):
        with suppress(
            Exception
        ):  # here, as several processes would make it at a time; they tell what is wrong with it
            make(family, FOLDER)
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {
            pool.submit(in_a_process, family, variant, limit_s): (family, variant)
            for family, variant in pairs
        }
        for done in as_completed(waiting):
            family, variant = waiting[done]
            seen = done.result()
            words = ", ".join(f"{name} {value}" for name, value in seen.items() if name != "right")
            mark = "WRONG" if not seen["right"] else "refused" if "refused" in seen else "right"
            print(f"{mark:7} {family:14} {variant:9} {words}", flush=True)
            rows.append({"family": family, "variant": variant, **seen})
            results.write_text(json.dumps(rows, indent=1))
    return rows


def in_a_process(
    family: str, variant: str, limit_s: float, module: str = "matrix"
) -> dict[str, Any]:
    """See `look`; also what ends the process, or takes too long, is told and ends nothing else.

    `module`: the one here that looks.
    """
    command = [
        sys.executable,
        "-m",
        f"bench.families.{module}",
        "--one",
        "--variants",
        variant,
        family,
    ]
    log = FOLDER / f"{family}-{variant}{'' if module == 'matrix' else f'-{module}'}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # As in `make test`: a small cache for chat, and no core that two engines would both take.
    small = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    small["VLLM_DEEP_GEMM_WARMUP"] = "skip"  # shapes that tiny models have no use for
    began = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=small | {**os.environ},
            process_group=0,
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"right": False, "error": f"not done within {limit_s:g} s, see {log}"}
        finally:  # vLLM's processes too, which would keep the pipe and a GPU's memory
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with log.open("ab") as written:
        written.write(said)  # where vLLM's processes write
    took = {"seconds": round(time.monotonic() - began)}
    lines = [line for line in said.decode(errors="replace").splitlines() if line.startswith("{")]
    if not lines:
        return {
            "right": False,
            "error": f"it ended with {process.returncode}, see {log}",
            **cause(log),
            **took,
        }
    seen: dict[str, Any] = json.loads(lines[-1])
    return seen | (cause(log) if "root cause above" in seen.get("refused", "") else {}) | took


def cause(log: Path) -> dict[str, str]:
    """What a log says last of an error, if it does."""
    found = _CAUSE.findall(log.read_text(errors="replace"))
    return {"cause": found[-1][:_CAUSE_LENGTH]} if found else {}


if __name__ == "__main__":
    main()
