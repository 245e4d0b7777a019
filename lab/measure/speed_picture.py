"""Draws how the time of a micro-batch is divided among its parts."""

from collections.abc import Sequence
from pathlib import Path

from lab.measure.speed import SeqLenSpeeds
from lab.measure.time_parts import PARTS
from lab.picture import DPI, save

OPTION = "--picture"
WIDTH_INCHES, BAR_INCHES, FRAME_INCHES = 8.0, 0.9, 2.4
# Colours for colour-blind readers (Okabe and Ito); grey for parts that compute nothing.
COLOURS = ("#56b4e9", "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#999999", "#dddddd")
# Smaller shares have no room for a number.
LEAST_LABEL = 0.04


def draw(picture: Path, title: str, seq_lens: Sequence[SeqLenSpeeds]) -> None:
    """Draws one bar for each seq_len, divided into the parts of a micro-batch's time in percent."""
    from matplotlib.figure import Figure  # pyplot would look for a display

    found = [(one, one.parts) for one in seq_lens if one.parts]
    height = BAR_INCHES * len(found) + FRAME_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=11, wrap=True)
    panel = figure.subplots()
    names = [
        f"seq_len {one.seq_len}\n{parts.n:,} nonces\n{1000 * parts.total_s:,.1f} ms"
        for one, parts in found
    ]
    left = [0.0] * len(found)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        shares = [100 * parts.share(part) for _, parts in found]
        bars = panel.barh(names, shares, left=left, color=colour, label=part, height=0.6)
        labels = [f"{share:.0f}" if share >= 100 * LEAST_LABEL else "" for share in shares]
        panel.bar_label(bars, labels, label_type="center", fontsize=8.5)
        left = [sum(both) for both in zip(left, shares, strict=True)]
    panel.invert_yaxis()
    panel.set_xlim(0, 100)
    panel.set_xlabel("% of the time of a whole micro-batch")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    save(figure, picture, OPTION)
