"""The tiny models that ship with Proofline, for the demo, the tests and a first try."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
# A checkout keeps the models at its top, a wheel inside this package (pyproject.toml).
_PLACES = (_HERE.parent / "models", _HERE / "models")


def shipped_models() -> dict[str, Path]:
    """Name -> directory of every shipped model."""
    for place in _PLACES:
        found = {
            config.parent.name: config.parent for config in sorted(place.glob("*/config.json"))
        }
        if found:
            return found
    return {}
