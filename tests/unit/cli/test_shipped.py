"""The models that ship with Proofline."""

import json

from cli.shipped import shipped_models


def test_tiny_models_ship() -> None:
    assert sorted(shipped_models()) == [
        "tiny-llama",
        "tiny-qwen3",
        "tiny-qwen3-256",
        "tiny-qwen3-moe",
        "tiny-qwen3-moe-256",
    ]


def test_a_shipped_model_is_complete() -> None:
    directory = shipped_models()["tiny-qwen3"]
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3"
    assert (directory / "model.safetensors").stat().st_size > 1_000_000
