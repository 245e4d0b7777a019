"""The model matrix: what holds of each family's tiny model, here. `make models` runs it.

    python -m tests.families.matrix [--variants float32,bfloat16,fp8] [FAMILY ...]

Each engine has a process of its own, and a log in build/families. What is neither right nor refused with a sentence is
wrong: exit code 1. docs/models.md keeps what was seen.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.families.make import families, make

FOLDER = Path(__file__).resolve().parents[2] / "build" / "families"
# A variant: number format of the weights, further arguments of vLLM.
VARIANTS = {"float32": ("float32", ()), "bfloat16": ("bfloat16", ()), "fp8": ("bfloat16", ("--kv-cache-dtype", "fp8"))}
# L2 of artifacts from transformers': the largest, of float32, and the mean, of bfloat16. A mixture of experts flips
# a router now and then (docs/protocol.md, "Golden data"), so its median counts.
FLOAT32_MOST, BFLOAT16_MEAN = 0.003, 0.05
# Of wrappers: no other tower is wanted here, and none has a processor.
_TEXT_ONLY = ("--language-model-only",)
_LIMIT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(families())}; default: all")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--one", action="store_true", help="in this process, as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(look(options.families[0], options.variants)), flush=True)
        return
    wrong = 0
    for family in options.families or families():
        for variant in options.variants.split(","):
            seen = _in_a_process(family, variant)
            wrong += not seen["right"]
            words = ", ".join(f"{name} {value}" for name, value in seen.items() if name != "right")
            mark = "WRONG" if not seen["right"] else "refused" if "refused" in seen else "right"
            print(f"{mark:7} {family:14} {variant:9} {words}", flush=True)
    print(f"{wrong} wrong")
    sys.exit(bool(wrong))


def _in_a_process(family: str, variant: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.families.matrix", "--one", "--variants", variant, family]
    log = FOLDER / f"{family}-{variant}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # As in `make test`: a small cache for chat, and no core that two engines would both take.
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, timeout=_LIMIT_S, env=small | {**os.environ}
            )
        except subprocess.TimeoutExpired:
            return {"right": False, "error": f"not done within {_LIMIT_S} s, see {log}"}
    with log.open("ab") as errors:
        errors.write(done.stdout)  # where vLLM's processes write
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    if not lines:
        return {"right": False, "error": f"it ended with {done.returncode}, see {log}"}
    seen: dict[str, Any] = json.loads(lines[-1])
    return seen


def look(family: str, variant: str) -> dict[str, Any]:
    """What is seen of one family: refused with a sentence, or every check."""
    import numpy as np

    from poc_core.errors import ProoflineError
    from tests.families import checks
    from workers.engines import load_engine
    from workers.engines.options import EngineOptions

    dtype, more = VARIANTS[variant]
    model = make(family, FOLDER)
    config = json.loads((model / "config.json").read_text())
    common = {"model": str(model), "served_model_name": family, "dtype": dtype}
    arguments = ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", *more]
    if "text_config" in config:
        arguments += _TEXT_ONLY
    try:
        engine = load_engine(EngineOptions(**common, max_batch_tokens=2048, vllm_args=tuple(arguments)), 120)
    except ProoflineError as error:
        return {"right": "\n" not in str(error), "refused": str(error)}
    with_experts = "experts" in json.dumps(config)
    try:
        seen: dict[str, Any] = {
            "caches": engine.info.caches,
            "layers": engine.info.layers,
            "reflected": engine.info.layers_reflected,
            "sliceable": engine.sliceable,
            "shared": checks.shared_against_private(engine) or engine.info.caches == "private",
            "slices": not engine.sliceable or checks.slices_against_whole(engine),
            "chat": checks.chat_between_slices(engine),
        }
        right = seen["shared"] and seen["slices"] and seen["chat"]
        if variant != "fp8":
            try:
                other = load_engine(EngineOptions(**common, engine="transformers"))
                errors = checks.against(engine, other)
            except (ProoflineError, NotImplementedError, ValueError) as error:
                seen["transformers"] = f"none ({str(error).splitlines()[0]})"
            else:
                middle = float(np.median(errors)) if with_experts else float(errors.max())
                right = right and (middle <= FLOAT32_MOST if variant == "float32" else errors.mean() <= BFLOAT16_MEAN)
                seen["transformers"] = f"mean {errors.mean():.4f} largest {errors.max():.4f}"
        return {"right": bool(right), **seen}
    finally:
        engine.close()


if __name__ == "__main__":
    main()
