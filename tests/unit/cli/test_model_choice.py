"""What --model may be, and the name under which clients find it."""

from pathlib import Path

import pytest

from cli.model_choice import ModelChoiceError, choose_model
from cli.shipped import shipped_models


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_a_shipped_model_by_its_name() -> None:
    assert choose_model("tiny-qwen3", None) == (str(shipped_models()["tiny-qwen3"]), "tiny-qwen3")


def test_a_directory_is_served_under_its_last_part(model_dir: Path) -> None:
    assert choose_model(str(model_dir), None) == (str(model_dir), "my-model")
    assert choose_model(f"{model_dir}/", None) == (str(model_dir), "my-model")


def test_a_relative_directory_becomes_absolute(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_dir)
    assert choose_model(".", None) == (str(model_dir), "my-model")


def test_a_directory_of_a_shipped_models_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny-qwen3").mkdir()
    (tmp_path / "tiny-qwen3" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert choose_model("tiny-qwen3", None)[0] == str(tmp_path / "tiny-qwen3")


def test_a_name_on_the_hub_is_passed_on() -> None:
    assert choose_model("Qwen/Qwen3-0.6B", None) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")


def test_the_name_for_clients_can_be_chosen(model_dir: Path) -> None:
    assert choose_model(str(model_dir), "other")[1] == "other"
    assert choose_model("tiny-qwen3", "other")[1] == "other"
    assert choose_model("Qwen/Qwen3-0.6B", "other")[1] == "other"


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelChoiceError, match=r"has no config\.json"):
        choose_model(str(tmp_path), None)


@pytest.mark.parametrize(
    "model",
    [
        "./none",
        "/no/such/model",
        "models/none/at-all",
        "~/none",
        "",
        "~nobody/x",
        "~\0",
        "./" + "x" * 5000,
    ],
)
def test_a_directory_that_does_not_exist_is_refused(model: str) -> None:
    with pytest.raises(ModelChoiceError, match=r"There is no directory .*tiny-qwen3"):
        choose_model(model, None)
