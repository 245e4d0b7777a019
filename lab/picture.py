"""Checks that a picture can be drawn, and saves it."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from cli.terminal import UsageError, check_output
from poc_core.errors import ProoflineError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg")
DPI = 110  # 880 pixels for 8 inches: legible on a page, small in a repository


class PictureError(ProoflineError):
    """Matplotlib, which draws the pictures, is not installed."""


def check_picture(picture: Path | None, option: str) -> None:
    """Raises an error if the picture cannot be drawn. Call it before hours of work. `option`: the
    option that names the file.

    UsageError: the file has a wrong type or cannot be written. PictureError: Matplotlib is missing.
    """
    if picture is None:
        return
    if picture.suffix.lower() not in KINDS:
        raise UsageError(
            f"{picture} cannot be drawn; choose a name that ends in {' or '.join(KINDS)}."
        )
    check_output(picture, option)
    check_matplotlib(option)


def check_matplotlib(what: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError(
            f"{what} needs matplotlib, which is not installed here; "
            "run `pip install 'proofline[calibrate]'` or, in a checkout, `make setup`."
        )


def save(figure: "Figure", picture: Path, option: str) -> None:
    try:
        figure.savefig(picture)
    except OSError as error:
        raise UsageError(
            f"Cannot write {picture} ({error.strerror}); choose another {option}."
        ) from error
