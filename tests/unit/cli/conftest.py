"""A stand-in for the hub."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from tests.peers.hub import Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, beside an empty cache."""
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Hub() as running:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: HfApi(running.url, token=False))
        yield running
