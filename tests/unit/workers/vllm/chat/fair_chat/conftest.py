"""A tokenizer for tests of fair chat."""

from typing import Any

import pytest

from cli.shipped import shipped_models


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shipped_models()["tiny-qwen3"])
