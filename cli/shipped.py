"""The tiny models that ship with Proofline, for the demo, the tests and a first try."""

import difflib
from pathlib import Path

from cli.terminal import UsageError

_HERE = Path(__file__).resolve().parent
# A checkout keeps the models at its top, a wheel inside this package (pyproject.toml).
_PLACES = (_HERE.parent / "models", _HERE / "models")


class ModelChoiceError(UsageError):
    """The value of --model names no model."""


def shipped_models() -> dict[str, Path]:
    """Name -> directory of every shipped model."""
    for place in _PLACES:
        found = {
            config.parent.name: config.parent for config in sorted(place.glob("*/config.json"))
        }
        if found:
            return found
    return {}


def check_spelling(model: str) -> None:
    """ModelChoiceError: this is nearly a shipped model's name."""
    shipped = shipped_models()
    if "/" in model or model in shipped:
        return
    if near := difflib.get_close_matches(model, shipped, n=1):
        raise ModelChoiceError(
            f"There is no model {model!r}; did you mean {near[0]}? Shipped are:"
            f" {', '.join(shipped)}."
        )
