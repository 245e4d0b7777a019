"""The tiny models that ship with Proofline, for the demo, the tests and a first try."""

from pathlib import Path

from poc_core.errors import ProoflineError

_HERE = Path(__file__).resolve().parent
# A checkout keeps the models at its top; a wheel carries them inside this package (pyproject.toml).
_PLACES = (_HERE.parent / "models", _HERE / "models")


class NotShippedError(ProoflineError):
    """The named model is not among those that ship with Proofline."""


def shipped_models() -> dict[str, Path]:
    """Name -> directory of every shipped model."""
    for place in _PLACES:
        found = {
            config.parent.name: config.parent for config in sorted(place.glob("*/config.json"))
        }
        if found:
            return found
    return {}


def shipped_model(name: str) -> Path:
    """Directory of a shipped model such as ``tiny-qwen3``.

    Raises NotShippedError, naming those there are.
    """
    models = shipped_models()
    if name not in models:
        there_are = ", ".join(models) or "none"
        raise NotShippedError(
            f"No model named {name!r} ships with Proofline; there are: {there_are}."
        )
    return models[name]
