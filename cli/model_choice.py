"""What --model may be: a shipped model's name, a directory, or a name on the Hugging Face hub."""

import os
from collections.abc import Sequence
from pathlib import Path

from cli.shipped import ModelChoiceError, check_spelling, shipped_models
from poc_core.errors import ProoflineError
from workers.engines.options import EngineOptions
from workers.vllm.start.log_patterns import NOT_HERE, NOT_ON_HUB

# Seconds for the hub's answer.
HUB_TIMEOUT_S = 5.0
_NOT_FOUND = (401, 403, 404)  # what the hub and its mirrors answer to a name they do not know
# vLLM looks for the model elsewhere.
_ELSEWHERE = ("VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH")


def choose_model(model: str, served_model_name: str | None) -> tuple[str, str]:
    """What the engine loads, and the name clients use.

    Without `served_model_name`, clients use the directory's last part or the hub's name.
    ModelChoiceError: the directory holds no model, or a shipped model's name is mistyped.
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
    check_spelling(model)
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


def check_is_there(options: EngineOptions) -> None:
    """Looks for the chosen model before an engine does, which asks the hub for minutes: in this
    machine's cache, then on the hub, once.

    ModelChoiceError: there is no such model. ProoflineError: the hub cannot be reached.
    """
    name = options.model
    elsewhere = any(os.environ.get(variable) for variable in _ELSEWHERE) or any(
        word.replace("_", "-").startswith("--download-dir") for word in options.vllm_args
    )
    if options.engine == "synthetic" or elsewhere or _directory(name) or _is_cached(name):
        return
    _ask_hub(name)


def check_can_be_found(model: str, vllm_args: Sequence[str]) -> None:
    """Looks for a model that hosts are to load, as `check_is_there` does, and with its errors.

    A path is each host's own matter.
    """
    if model in shipped_models() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        return
    check_is_there(EngineOptions(model=model, engine="vllm", vllm_args=tuple(vllm_args)))


def _is_cached(name: str) -> bool:
    """Whether anything of the model is in the Hugging Face cache; what lacks is fetched later."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        folder = repo_folder_name(repo_id=name.partition(":")[0], repo_type="model")
    except HFValidationError:
        return False
    return any(Path(constants.HF_HUB_CACHE, folder, "snapshots").glob("*/*"))


def _ask_hub(name: str) -> None:
    from huggingface_hub import HfApi, errors

    try:
        HfApi().model_info(name.partition(":")[0], timeout=HUB_TIMEOUT_S)
    except errors.OfflineModeIsEnabled:
        raise ProoflineError(f"There is no model {name!r} here: {NOT_HERE}.") from None
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        answer = getattr(error, "response", None)
        if answer is None or answer.status_code in _NOT_FOUND:
            raise ModelChoiceError(f"There is no model {name!r}: {NOT_ON_HUB}.") from None
        # Else the hub has a trouble that may have passed when the engine asks.
    except Exception as error:  # of whatever client the hub's package has
        said = " ".join(str(error).split()) or type(error).__name__
        raise ProoflineError(
            f"The model {name!r} is not on this machine, and the Hugging Face hub cannot be reached"
            f" ({said}): give a model's directory, copy the model into HF_HOME, or take a shipped"
            f" one: {', '.join(shipped_models())}."
        ) from None
