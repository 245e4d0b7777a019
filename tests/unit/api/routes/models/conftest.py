"""Models in the Hugging Face cache, over HTTP."""

from pathlib import Path

import pytest

from api.models import downloads as model_downloads
from api.models.cache import ModelCache
from api.models.downloads import Downloads
from poc_core.state.downloads import Download


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Download]:
    """The downloads whose processes would have been started."""
    begun: list[Download] = []
    monkeypatch.setattr(Downloads, "begin", lambda _, download: begun.append(download))
    monkeypatch.setattr(model_downloads, "LOOK_S", 1000.0)  # tests look themselves
    return begun


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ModelCache, "path", tmp_path / "hub")
    return tmp_path / "hub"
