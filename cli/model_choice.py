"""What --model may be: a shipped model's name, a directory, or a name on the Hugging Face hub."""

from pathlib import Path

from cli.shipped import shipped_models
from cli.terminal import UsageError
from workers.engines.options import EngineOptions


class ModelChoiceError(UsageError):
    """The value of --model names no model."""


def choose_model(model: str, served_model_name: str | None) -> tuple[str, str]:
    """What the engine loads, and the name clients use.

    Without `served_model_name`, clients use the directory's last part or the hub's name.
    ModelChoiceError: the directory holds no model.
    """
    shipped = shipped_models()
    directory = _directory(model)
    if model in shipped and directory is None:
        return str(shipped[model]), served_model_name or model
    if directory is not None:
        if not (directory / "config.json").is_file():
            raise ModelChoiceError(
                f"The directory {model} has no config.json; give the directory of a model."
            )
        # Absolute, as workers may run elsewhere; unresolved, as the owner chose the link's name.
        return str(directory.absolute()), served_model_name or directory.absolute().name
    # The hub's names are NAME or OWNER/NAME.
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or not model.strip():
        raise ModelChoiceError(
            f"There is no directory {model!r}; give a model's directory, a name on the Hugging Face"
            f" hub, or one of the shipped models: {', '.join(shipped)}."
        )
    return model, served_model_name or model


def _directory(model: str) -> Path | None:
    """The directory of this name; None: there is none."""
    try:
        directory = Path(model).expanduser()
        return directory if model and directory.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, ~ of nobody, a NUL
        return None


def with_chosen_model(options: EngineOptions) -> EngineOptions:
    """The options with both names of the model; options that have both stay as they are."""
    path, name = choose_model(options.model, options.served_model_name)
    return options.model_copy(update={"model": path, "served_model_name": name})
