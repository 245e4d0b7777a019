"""Draws the pictures of a report: the machines' distances, and the risks of a rule."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lab.judge.power import Rule
from lab.judge.report_findings import Findings
from lab.picture import DPI, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPTION = "--output"
BINS = 60
POINTS = 100
# Colours for colour-blind readers (Okabe and Ito).
HONEST, TAMPERED, MARK, USUAL = "#0072b2", "#d55e00", "#000000", "#777777"
# Lower risks are drawn as this value.
LEAST_RISK = 1e-5


def draw_offsets(picture: Path, findings: Findings) -> None:
    """Draws histograms of the honest and of the tampered offsets, with the recommended and the
    network's threshold.

    Each comparison also has a line of its own.
    """
    figure, (panel,) = _figure(8.0, 4.0)
    comparisons = findings.comparisons
    edges = _scale([sample.offsets for _, sample, _ in findings.rows()], BINS + 1)
    for label, colour, samples in (
        ("honest", HONEST, comparisons.honest),
        ("tampered", TAMPERED, comparisons.tampered),
    ):
        parts = [_percent_in_bins(sample.offsets, edges) for sample in samples]
        panel.stairs(
            np.mean(parts, axis=0), edges, fill=True, color=colour, alpha=0.3, label=f"{label}, all"
        )
        for index, part in enumerate(parts if len(parts) > 1 else []):
            name = f"each of {len(parts)} comparisons" if index == 0 else None
            panel.stairs(part, edges, color=colour, linewidth=0.7, label=name)
    usual, threshold = findings.usual.rule.dist_threshold, findings.recommended.rule.dist_threshold
    panel.axvline(usual, color=USUAL, linestyle=":", label=f"the network's threshold {usual:g}")
    panel.axvline(
        max(threshold, edges[0]), color=MARK, linestyle="--", label=f"recommended {threshold:g}"
    )
    panel.set_xscale("log")
    panel.set_xlabel(f"{comparisons.unit} (what is below the axis, 0 too, is in the first bar)")
    panel.set_ylabel("% of nonces")
    panel.legend(fontsize=8, frameon=False)
    save(figure, picture, OPTION)


def draw_power(picture: Path, findings: Findings) -> None:
    """Draws how the rates of false alarms and misses change with each parameter of the recommended
    rule, while its other parameters stay the same.
    """
    figure, panels = _figure(11.0, 4.0, columns=3)
    rule = findings.recommended.rule
    offsets = _scale([sample.offsets for _, sample, _ in findings.rows()], POINTS)
    chances = np.geomspace(min(1e-4, rule.p_mismatch), 0.5, POINTS)
    counts = np.unique(np.geomspace(1, max(4 * rule.n, 50), POINTS).round().astype(int))
    for panel, name, values, chosen, rule_of in (
        (
            panels[0],
            "dist_threshold",
            offsets,
            rule.dist_threshold,
            lambda x: replace(rule, dist_threshold=float(x)),
        ),
        (
            panels[1],
            "p_mismatch",
            chances,
            rule.p_mismatch,
            lambda x: replace(rule, p_mismatch=float(x)),
        ),
        (panels[2], "nonces checked", counts, rule.n, lambda x: replace(rule, n=int(x))),
    ):
        _draw_risks(panel, findings, values, rule_of)
        panel.axvline(
            max(chosen, values[0]),
            color=MARK,
            linestyle="--",
            linewidth=1,
            label=f"recommended {chosen:g}",
        )
        panel.set_xscale("log")
        panel.set_xlabel(name)
        panel.set_title(f"recommended {chosen:g}", fontsize=9)
    panels[0].set_yscale("log")  # of all panels
    panels[0].set_ylim(LEAST_RISK, 1.5)
    panels[0].yaxis.set_major_formatter(lambda risk, _: f"{100 * risk:g} %")
    panels[0].set_ylabel("of validations (below the axis: never)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles[:4], labels[:4], loc="outside lower center", ncols=4, fontsize=8, frameon=False
    )
    save(figure, picture, OPTION)


def draw_machines(picture: Path, findings: Findings) -> None:
    """Draws the mean distance of each pair of machines as a heat map."""
    names, means = findings.comparisons.names, findings.comparisons.means
    side = 2.0 + 0.9 * len(names)
    figure, (panel,) = _figure(side + 1.5, side)
    apart = np.where(means > 0, means, np.nan)
    shown = np.log10(apart) if np.isfinite(apart).any() else apart
    panel.imshow(shown, cmap="viridis_r")
    middle = np.nanmean(shown) if np.isfinite(shown).any() else 0.0
    for (row, column), mean in np.ndenumerate(means):
        colour = (
            "white" if np.isfinite(shown[row, column]) and shown[row, column] > middle else "black"
        )
        text = "" if np.isnan(mean) else f"{mean:.3g}"
        panel.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    panel.set_xticks(
        range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor", fontsize=8
    )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_title("mean L2 distance", fontsize=10)
    save(figure, picture, OPTION)


def _draw_risks(
    panel: "Axes",
    findings: Findings,
    values: npt.NDArray[np.float64],
    rule_of: Callable[[float], Rule],
) -> None:
    for at_worst, style in ((False, "-"), (True, ":")):
        risks = [findings.evidence.risks(rule_of(value), at_worst) for value in values]
        suffix = ", at worst" if at_worst else ""
        panel.plot(
            values,
            _drawn([risk.false_alarm for risk in risks]),
            style,
            color=HONEST,
            label=f"false alarm{suffix}",
        )
        panel.plot(
            values,
            _drawn([risk.miss for risk in risks]),
            style,
            color=TAMPERED,
            label=f"miss{suffix}",
        )


def _drawn(risks: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.maximum(risks, LEAST_RISK)


def _scale(offsets: Sequence[npt.NDArray[np.float64]], n: int) -> npt.NDArray[np.float64]:
    """Returns n values for a logarithmic axis that covers all offsets above 0, but at most about
    five decades.
    """
    together = np.concatenate(offsets)
    highest = 1.3 * together.max() or 1.0
    above = together[together > 0]
    lowest = max(above.min() / 1.3, highest * 1e-5) if len(above) else highest / 10
    return np.geomspace(lowest, highest, n)


def _percent_in_bins(
    offsets: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    counts, _ = np.histogram(np.clip(offsets, edges[0], edges[-1]), edges)
    return 100 * counts / len(offsets)


def _figure(width: float, height: float, columns: int = 1) -> tuple["Figure", list["Axes"]]:
    """Creates a figure of `width` x `height` inches with panels side by side that share their y
    axis.
    """
    from matplotlib.figure import Figure  # pyplot would look for a display

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels
