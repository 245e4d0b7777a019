"""Draws a histogram of the distances that `calibrate` measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.judge.calibration import Calibration
from lab.picture import DPI, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BINS = 40
PANEL_INCHES = (8.0, 2.9)
# Colours for colour-blind readers (Okabe and Ito).
BAR, LINE, MARK = "#9ecae1", "#08519c", "#d55e00"


def draw(
    picture: Path,
    title: str,
    distances: Mapping[str, Sequence[np.ndarray]],
    calibrations: Mapping[str, Calibration],
) -> None:
    """Draws one histogram per randomization to the file `picture`: bars for all distances, lines
    for single block hashes, vertical lines at the r_targets.

    `distances`: for each randomization, one float64 (n,) per block hash.
    """
    from matplotlib.figure import Figure  # pyplot would look for a display

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width, height * len(distances) + 0.5), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=11, wrap=True)
    panels = figure.subplots(len(distances), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    everything = np.concatenate([block for blocks in distances.values() for block in blocks])
    edges = np.linspace(everything.min(), everything.max(), BINS + 1)
    for panel, (randomization, blocks) in zip(panels, distances.items(), strict=True):
        _draw_panel(panel, edges, blocks, calibrations[randomization])
        panel.set_title(randomization, loc="left", fontsize=10)
    panels[-1].set_xlabel("distance")
    highest = panels[0].get_ylim()[1]
    panels[0].set_ylim(top=highest * 1.25)  # of all panels; room for the marks' texts
    save(figure, picture, "--histogram")


def _draw_panel(
    panel: "Axes", edges: np.ndarray, blocks: Sequence[np.ndarray], calibration: Calibration
) -> None:
    n_blocks = len(blocks)
    # percent in each bin
    shares = [100 * np.histogram(block, edges)[0] / len(block) for block in blocks]
    panel.stairs(np.mean(shares, axis=0), edges, fill=True, color=BAR, label="all block hashes")
    if n_blocks > 1:
        for index, share in enumerate(shares):
            label = f"each of the {n_blocks} block hashes" if index == 0 else None
            panel.stairs(share, edges, color=LINE, linewidth=0.7, alpha=0.55, label=label)
    panel.set_ylim(bottom=0)
    for place, target in enumerate(calibration.targets):
        panel.axvline(target.r_target, color=MARK, linewidth=1.4)
        panel.text(
            target.r_target,
            0.98 - 0.09 * place,  # of the panel's height
            f"{target.r_target:.4f}: {100 * target.valid_rate:.1f} % valid ",
            transform=panel.get_xaxis_transform(),
            ha="right",
            va="top",
            color=MARK,
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    panel.set_ylabel("% of nonces")
    panel.legend(loc="upper right", fontsize=8, frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
