"""Figures that any study may need, from numbers alone: lines with spread, bars, maps, points, histograms, boxes.

Every function returns a `matplotlib.figure.Figure`; labels carry the units.
"""
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from tvjax import results
from tvjax.plotting import COLOURS, MARKERS, STYLE, plain


def lines(series: Mapping[str, Mapping], *, x: str, y: str, log: bool = False, width: float = 4.8) -> Figure:
    """One line a name: {x: value, or the list of values of several seeds, shown as mean with its deviation}.

    >>> lines({"ties": {1: [0.5, 0.7], 2: [0.4, 0.4]}}, x="tasks", y="accuracy (%)").axes[0].get_xlabel()
    'tasks'
    """
    figure, axes = plain(width, 3.3)
    for i, (label, found) in enumerate(series.items()):
        cells = [results.mean_std(np.atleast_1d(value).tolist()) for value in found.values()]
        mean, spread = np.array(cells).T
        axes.errorbar(list(found), mean, yerr=spread if spread.any() else None, label=label, lw=1.6, ms=4.5, capsize=2,
                      color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)])
    if log:
        axes.set_xscale("log")
    axes.grid(color=STYLE["grid"], linewidth=0.6)
    return _named(axes, figure, x, y, many=len(series) > 1)


def bars(groups: Mapping[str, Mapping[str, float | Sequence[float]]], *, y: str) -> Figure:
    """Bars side by side: {series: {place on the x axis: value, or the values of several seeds}}."""
    places = list(dict.fromkeys(place for found in groups.values() for place in found))
    figure, axes = plain(2.0 + 0.24 * len(places) * (len(groups) + 1), 3.3)
    width = 0.84 / max(len(groups), 1)
    for i, (label, found) in enumerate(groups.items()):
        cells = [results.mean_std(np.atleast_1d(value).tolist()) for value in found.values()]
        mean, spread = np.array(cells).T
        where = np.array([places.index(place) for place in found]) + (i - (len(groups) - 1) / 2) * width
        axes.bar(where, mean, width, yerr=spread if spread.any() else None, label=label, error_kw={"linewidth": 0.8},
                 color=COLOURS[i % len(COLOURS)])
    axes.set_xticks(range(len(places)), places, rotation=40 if len(places) > 4 else 0,
                    ha="right" if len(places) > 4 else "center", rotation_mode="anchor")
    return _named(axes, figure, "", y, many=len(groups) > 1)


def heat_map(matrix, *, rows: Sequence[str], columns: Sequence[str], label: str, x: str = "", y: str = "",
             diverging: bool = False, digits: int = 2) -> Figure:
    """A matrix with its numbers written in; `diverging` puts white at 0."""
    matrix = np.asarray(matrix, float)
    across, up = (max(map(len, map(str, names)), default=0) for names in (rows, columns))  # room for their letters
    figure, axes = plain(1.9 + 0.07 * across + 0.5 * len(columns), 0.9 + 0.06 * up + 0.36 * len(rows))
    top = np.nanmax(np.abs(matrix)) or 1.0
    low, high = (-top, top) if diverging else (None, None)
    colours = colormaps["RdBu_r" if diverging else "cividis"]
    image = axes.imshow(matrix, cmap=colours, aspect="auto", vmin=low, vmax=high)
    for (i, j), value in np.ndenumerate(matrix):
        if math.isfinite(value) and matrix.size <= 450:
            red, green, blue, _ = image.cmap(image.norm(value))
            axes.text(j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=7,
                      color="black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white")
    axes.set_xticks(range(len(columns)), columns, rotation=50, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label=label)
    return _named(axes, figure, x, y, many=False)


def surface(values, *, xs, ys, label: str, x: str, y: str, box: float | None = None, logarithmic: bool = False,
            marks: Mapping[str, Sequence] | None = None) -> Figure:
    """A function of two numbers, `values[i, j]` at (xs[j], ys[i]); `box`: the side of a dashed square [0, box]²."""
    figure, axes = plain(5.0, 4.0)
    norm = LogNorm() if logarithmic else None
    image = axes.pcolormesh(xs, ys, np.asarray(values, float), cmap=colormaps["cividis"], norm=norm, shading="nearest")
    if box:
        axes.plot([0, box, box, 0, 0], [0, 0, box, box, 0], "--", color="white", lw=1.2)
    for mark, (across, up) in (marks or {}).items():
        axes.plot(across, up, "o", color="white", mec="black", ms=5)
        axes.annotate(mark, (across, up), xytext=(4, 4), textcoords="offset points", color="white", fontsize=8)
    figure.colorbar(image, ax=axes, label=label)
    return _named(axes, figure, x, y, many=False)


def scatter(series: Mapping[str, tuple], *, x: str, y: str, bisector: bool = False) -> Figure:
    """Points, {label: (xs, ys)}; with the bisector x = y where asked for."""
    figure, axes = plain(4.6, 3.9)
    for i, (label, (across, up)) in enumerate(series.items()):
        axes.scatter(across, up, s=26, label=label, color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)])
    if bisector:
        every = np.concatenate([np.ravel(part) for pair in series.values() for part in pair])
        axes.plot([every.min(), every.max()], [every.min(), every.max()], "--", color="#888888", lw=1)
    axes.grid(color=STYLE["grid"], linewidth=0.6)
    return _named(axes, figure, x, y, many=len(series) > 1)


def histogram(edges, counts: Mapping[str, Sequence[float]], *, x: str, y: str, log: bool = False) -> Figure:
    """Steps of counts between `edges`, one outline a label."""
    figure, axes = plain(4.8, 3.2)
    for i, (label, heights) in enumerate(counts.items()):
        axes.stairs(heights, edges, label=label, color=COLOURS[i % len(COLOURS)], lw=1.5)
    if log:
        axes.set_yscale("log")
    return _named(axes, figure, x, y, many=len(counts) > 1)


def boxes(groups: Mapping[str, Sequence[float]], *, y: str) -> Figure:
    """A box for each name, from its quartiles."""
    figure, axes = plain(1.8 + 0.42 * len(groups), 3.4)
    axes.boxplot(list(groups.values()), widths=0.6, flierprops={"markersize": 3},
                 medianprops={"color": COLOURS[1], "lw": 1.6})
    axes.set_xticks(range(1, len(groups) + 1), list(groups), rotation=45, ha="right", rotation_mode="anchor")
    return _named(axes, figure, "", y, many=False)


def _named(axes, figure: Figure, x: str, y: str, *, many: bool) -> Figure:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if many:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)
    return figure
