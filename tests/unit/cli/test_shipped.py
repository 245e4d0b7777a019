"""The models that ship with Proofline."""

import json

import pytest

from cli.shipped import NotShippedError, shipped_model, shipped_models

SHIPPED = ["tiny-llama", "tiny-qwen3", "tiny-qwen3-256", "tiny-qwen3-moe", "tiny-qwen3-moe-256"]


def test_tiny_models_ship() -> None:
    assert sorted(shipped_models()) == [
        "tiny-llama",
        "tiny-qwen3",
        "tiny-qwen3-256",
        "tiny-qwen3-moe",
        "tiny-qwen3-moe-256",
    ]


def test_a_shipped_model_is_complete() -> None:
    directory = shipped_model("tiny-qwen3")
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3"
    assert (directory / "model.safetensors").stat().st_size > 1_000_000


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(NotShippedError, match=", ".join(SHIPPED)):
        shipped_model("gpt-5")
