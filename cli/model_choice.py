"""Finds the model that --model names: shipped, the demo model, in a directory, or on the hub."""

import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub.constants

from api.models.cache import ModelCache
from api.models.files import BrokenModelError
from cli.demo_model import DEMO_MODEL, demo_model
from cli.shipped import ModelChoiceError, check_spelling, shipped_models
from poc_core.errors import ProoflineError
from workers.engines.options import EngineOptions
from workers.vllm.start.log_patterns import NOT_HERE, NOT_ON_HUB

logger = logging.getLogger(__name__)

# Seconds for the hub's answer.
HUB_TIMEOUT_S = 5.0
_NOT_FOUND = (401, 403, 404)  # statuses of the hub and its mirrors for an unknown name
# With these variables, vLLM loads models from elsewhere.
_ELSEWHERE = ("VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH")


def choose_model(model: str, served_model_name: str | None) -> tuple[str, str]:
    """Returns (the directory or hub name that the engine loads, the model's name for clients).

    The name for clients is `served_model_name`. If that is None, the name is `model` or, for a
    directory, its last part. Raises ModelChoiceError for a model that does not exist, or a misspelt
    shipped model.
    """
    shipped = shipped_models()
    directory = _directory(model)
    if model in shipped and directory is None:
        return str(shipped[model]), served_model_name or model
    if model == DEMO_MODEL and directory is None:
        return str(demo_model()), served_model_name or model
    if directory is not None:
        if not (directory / "config.json").is_file():
            raise ModelChoiceError(
                f"The directory {model} has no config.json; give the directory of a model."
            )
        # Absolute, for workers elsewhere; with symlinks, whose name the operator chose.
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
    try:
        directory = Path(model).expanduser()
        return directory if model and directory.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, ~ of an unknown user, a NUL
        return None


def with_chosen_model(options: EngineOptions) -> EngineOptions:
    path, name = choose_model(options.model, options.served_model_name)
    return options.model_copy(update={"model": path, "served_model_name": name})


def check_is_there(options: EngineOptions) -> None:
    """Checks that the model is in this machine's cache. If not, asks the Hugging Face hub once.

    Raises ModelChoiceError if the model is in neither place, ProoflineError if the hub is
    unreachable.
    """
    if not _comes_from_hub(options):
        return
    name, revision = options.model, _revision(options.vllm_args)
    here = _here(name, revision)
    if here is not None:
        _ask_hub(name, revision, here)


def need_no_hub(options: EngineOptions) -> None:
    """Forbids this process and its children to ask the Hugging Face hub, if the hub does not
    confirm a model that is complete on disk. Otherwise vLLM retries for minutes, and then fails.
    """
    constants = huggingface_hub.constants
    if constants.HF_HUB_OFFLINE or not _comes_from_hub(options):
        return
    name, revision = options.model, _revision(options.vllm_args)
    # Without the hub, vLLM loads the revision `main`.
    if ModelCache().stage(name.partition(":")[0], revision or "main") != "DOWNLOADED":
        return
    try:
        _confirm(name, revision)
    except Exception as error:  # from the hub's answer, or from the HTTP client
        logger.warning(
            "the Hugging Face hub does not confirm %s (%s); it is loaded from %s, without the hub",
            *(name, _said(error)[:200], ModelCache().path),
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


def _comes_from_hub(options: EngineOptions) -> bool:
    elsewhere = any(os.environ.get(variable) for variable in _ELSEWHERE) or any(
        word.replace("_", "-").startswith("--download-dir") for word in options.vllm_args
    )
    return options.engine != "synthetic" and not elsewhere and not _directory(options.model)


def _revision(vllm_args: Sequence[str]) -> str | None:
    """Returns the value of the last --revision, the one that vLLM uses; None without --revision."""
    found = None
    for word, after in itertools.zip_longest(vllm_args, vllm_args[1:]):
        option, _, value = word.partition("=")
        if option == "--revision":
            found = value or after
    return found


def check_can_be_found(model: str, vllm_args: Sequence[str]) -> None:
    """Checks that other hosts can load a model of the hub. Shipped models and paths always pass."""
    known = {*shipped_models(), DEMO_MODEL}
    if model in known or model.startswith((".", "/", "~")) or model.count("/") > 1:
        return
    check_is_there(EngineOptions(model=model, engine="vllm", vllm_args=tuple(vllm_args)))


def as_on_hosts(model: str) -> str:
    """Returns the model's name, or the absolute path for a directory named ./X or ../X, because
    hosts run in other folders. Raises ModelChoiceError if there is no such directory.
    """
    if not model.startswith("."):
        return model
    directory = _directory(model)
    if directory is None:
        raise ModelChoiceError(
            f"There is no directory {model!r} here; give the absolute path of a directory that"
            " exists on every host."
        )
    return str(directory.absolute())


def _here(name: str, revision: str | None) -> str | None:
    """Returns None if the cache contains the revision, otherwise a text about the cache's contents.

    One cached file of the revision suffices, because vLLM downloads missing files later. If
    `revision` is None, any revision suffices. With HF_HUB_OFFLINE only `main` suffices, because
    vLLM then uses `main`.
    """
    cache, repo = ModelCache(), name.partition(":")[0]
    if revision is None and huggingface_hub.constants.HF_HUB_OFFLINE:
        revision = "main"
    try:
        found = cache.revisions(repo, revision)
    except BrokenModelError as error:
        return str(error)
    if any(any(one.folder.glob("*")) for one in found):
        return None
    return cache.here(repo)


def _ask_hub(name: str, revision: str | None, here: str) -> None:
    what = repr(name) + (f" at the revision {revision!r}" if revision else "")
    try:
        _confirm(name, revision)
    except huggingface_hub.errors.OfflineModeIsEnabled:
        raise ProoflineError(f"There is no model {what} here: {NOT_HERE} ({here}).") from None
    except huggingface_hub.errors.RevisionNotFoundError:
        raise ModelChoiceError(f"The hub has no model {what} ({here}).") from None
    except (
        huggingface_hub.errors.HfHubHTTPError,
        huggingface_hub.errors.HFValidationError,
    ) as error:
        answer = getattr(error, "response", None)
        if answer is None or answer.status_code in _NOT_FOUND:
            raise ModelChoiceError(f"There is no model {what}: {NOT_ON_HUB}.") from None
        # For other statuses the hub may have recovered when the engine asks.
    except Exception as error:  # from the HTTP client of the hub's package
        raise ProoflineError(
            f"The model {what} is not on this machine, and the Hugging Face hub cannot be reached"
            f" ({_said(error)}; {here}): give a model's directory, copy the model into HF_HOME, or"
            f" take a shipped one: {', '.join(shipped_models())}."
        ) from None


def _confirm(name: str, revision: str | None) -> None:
    """Asks the hub for a model. Any exception means that the hub does not confirm the model."""
    huggingface_hub.HfApi().model_info(
        name.partition(":")[0], revision=revision, timeout=HUB_TIMEOUT_S
    )


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
