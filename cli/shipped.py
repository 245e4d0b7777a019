"""The small models that ship with Proofline, for the demo, the tests and first steps."""

import difflib
from pathlib import Path

from cli.terminal import UsageError

_HERE = Path(__file__).resolve().parent
# Models are at the top of a checkout, or inside this package in a wheel (pyproject.toml).
_PLACES = (_HERE.parent / "models", _HERE / "models")


class ModelChoiceError(UsageError):
    """The value of --model names no usable model."""


def shipped_models() -> dict[str, Path]:
    for place in _PLACES:
        found = {
            config.parent.name: config.parent for config in sorted(place.glob("*/config.json"))
        }
        if found:
            return found
    return {}


def check_spelling(model: str) -> None:
    """Raises ModelChoiceError if `model` looks like a misspelt name of a shipped model."""
    shipped = shipped_models()
    if "/" in model or model in shipped:
        return
    if near := difflib.get_close_matches(model, shipped, n=1):
        raise ModelChoiceError(
            f"There is no model {model!r}; did you mean {near[0]}? Shipped are:"
            f" {', '.join(shipped)}."
        )
