"""Makes the artifacts beside it anew: `python -m tests.data.report.make`.

Honest: tiny-qwen3 as three engines and number formats compute it. Cheats: the same model with its
matrices rounded to eight and to four bits, which would take half and a quarter of the memory.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "tiny-qwen3"
PROOF = ["--block-hash", "report", "--public-key", "node-1", "--nonces", "0-199", "--seq-len", "32"]
HONEST = {
    "transformers-float32": ["--engine", "transformers", "--dtype", "float32"],
    "transformers-bfloat16": ["--engine", "transformers", "--dtype", "bfloat16"],
    "vllm-bfloat16": ["--engine", "vllm", "--dtype", "bfloat16", "--max-batch-tokens", "2048"],
}
CHEATS = {"int8": 8, "int4": 4}  # bits


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row to the integers of that many bits, its largest value to the largest of them."""
    step = weight.float().abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    nearest: torch.Tensor = (torch.round(weight / step) * step).to(weight.dtype)
    return nearest


def quantized(folder: Path, bits: int) -> Path:
    model = folder / f"tiny-qwen3-int{bits}"
    shutil.copytree(MODEL, model)
    weights = load_file(model / "model.safetensors")
    matrices = {
        name: rounded(weight, bits)
        for name, weight in weights.items()
        if weight.ndim == 2 and "layers" in name
    }
    save_file(weights | matrices, model / "model.safetensors", metadata={"format": "pt"})
    return model


def compute(name: str, model: Path, options: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "cli.main",
        "compute",
        "--model",
        str(model),
        *PROOF,
        *options,
        "--json",
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (HERE / f"{name}.json").write_text(done.stdout)


def main() -> None:
    for name, options in HONEST.items():
        compute(name, MODEL, options)
    with tempfile.TemporaryDirectory() as folder:
        for name, bits in CHEATS.items():
            compute(name, quantized(Path(folder), bits), HONEST["transformers-bfloat16"])


if __name__ == "__main__":
    main()
