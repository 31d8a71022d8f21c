"""Figures drawn from rows of results alone: accuracy for each task, over the number of tasks, over α, and cosines.

Every function returns a `matplotlib.figure.Figure`; nothing is shown or saved and no global state changes. Several
seeds appear as their mean, with the sample standard deviation where there is room for it.
"""
import csv
import io
import math
import operator

import numpy as np
from matplotlib import colormaps
from matplotlib.collections import PathCollection, QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tvjax import results

ANCHORS = ("zero-shot", "fine-tuned")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#666666")  # Okabe & Ito first
MARKERS = "osD^vPX*"
STYLE = {"spines": ("top", "right"), "grid": "#dddddd", "text": "#222222", "range": "#e3e3e3"}


def methods(rows) -> list[str]:
    """The merges among the rows, in order of appearance; zero-shot and fine-tuned models are not merges."""
    return list(dict.fromkeys(row["method"] for row in rows if "scale" in row and row["method"] not in ANCHORS))


def look(rows) -> dict[str, tuple[str, str]]:
    """{method: (colour, marker)}, the same in all figures of the same rows."""
    return {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(methods(rows))}


def per_task(rows, *, tasks: int) -> Figure:
    """A bar for each task from the zero-shot to the fine-tuned model's test accuracy, with a mark for each merge."""
    chosen = _test(rows, "accuracy", tasks)
    names = [name for name in dict.fromkeys(row["task"] for row in chosen) if name != "average"]
    value = _means(chosen, "method", "task")
    figure, axes = plain(7.2, 1.2 + 0.36 * len(names))
    places = np.arange(len(names))[::-1]
    low, high = (np.array([100 * value[anchor, name] for name in names]) for anchor in ANCHORS)
    axes.barh(places, high - low, left=low, height=0.62, color=STYLE["range"], label="zero-shot to\nfine-tuned")
    for method, (colour, marker) in look(rows).items():
        axes.plot([100 * value[method, name] for name in names], places, marker, color=colour, markersize=6,
                  markeredgecolor="white", markeredgewidth=0.6, label=method, zorder=3)
    axes.set_yticks(places, names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(min(low.min(), *axes.get_xlim()) - 1.5, None)
    axes.set_xlabel("test accuracy (%)")
    axes.grid(axis="x", color=STYLE["grid"], linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    _legend(axes)
    return figure


def radar(rows, *, tasks: int) -> Figure:
    """Normalised test accuracy of every merge on a circle of tasks; the rim of 100 % is the fine-tuned model."""
    chosen = _test(rows, "normalised accuracy", tasks)
    names = [name for name in dict.fromkeys(row["task"] for row in chosen) if name != "average"]
    value = _means(chosen, "method", "task")
    angles = np.linspace(0, 2 * math.pi, len(names), endpoint=False)
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.add_subplot(projection="polar")
    lines = {"zero-shot": ("#999999", ""), **look(rows)}
    for method, (colour, _) in lines.items():
        ring = [100 * value[method, name] for name in names]
        axes.plot([*angles, angles[0]], [*ring, ring[0]], color=colour, linewidth=1.6, label=method,
                  linestyle=":" if method in ANCHORS else "-")
    axes.plot(np.linspace(0, 2 * math.pi, 200), np.full(200, 100), color="#222222", linewidth=0.8, linestyle="--")
    axes.set_xticks(angles, names, fontsize=8)
    axes.tick_params(axis="x", pad=7)
    axes.set_rlabel_position(180 / len(names))  # pyright: ignore[reportAttributeAccessIssue]: polar axes have it
    axes.set_ylim(0, max(105.0, axes.get_ylim()[1]))
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(color=STYLE["grid"], linewidth=0.6)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def over_tasks(rows) -> Figure:
    """Average normalised test accuracy over the number of merged tasks; the band is ± one deviation over seeds."""
    chosen = results.select(rows, metric="normalised accuracy", split="test", task="average")
    counts = sorted({row["tasks"] for row in chosen})
    figure, axes = plain(5.6, 3.6)
    lines = {"zero-shot": ("#999999", "."), **look(rows)}
    for method, (colour, marker) in lines.items():
        cells = [_mean_std(chosen, method=method, tasks=count) for count in counts]
        mean, spread = np.array(cells).T * 100
        axes.plot(counts, mean, marker=marker, color=colour, linewidth=1.6, markersize=5, label=method,
                  linestyle=":" if method in ANCHORS else "-")
        if spread.any():
            axes.fill_between(counts, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
    axes.set_xticks(counts)
    axes.set_xlabel("number of merged tasks")
    axes.set_ylabel("normalised test accuracy (%)")
    axes.grid(color=STYLE["grid"], linewidth=0.6)
    _legend(axes)
    return figure


def over_scales(rows, *, tasks: int) -> Figure:
    """Average normalised accuracy over α on the split that chose it; the larger mark is the choice (of each seed)."""
    chosen = results.select(rows, metric="trace", tasks=tasks)
    figure, axes = plain(5.6, 3.6)
    for method, (colour, marker) in look(rows).items():
        mine = results.select(chosen, method=method)
        if not mine:
            continue
        value = _means(mine, "scale")
        axes.plot(list(value), [100 * x for x in value.values()], color=colour, linewidth=1.6, label=method)
        for scale in {row["scale"] for row in results.select(rows, method=method, metric="accuracy", task="average",
                                                             split="test", tasks=tasks)}:
            axes.plot(scale, 100 * value[scale], marker, color=colour, markersize=7, markeredgecolor="white", zorder=3)
    split = chosen[0]["split"] if chosen else "val"
    axes.set_xlabel("α")
    axes.set_ylabel(f"normalised {_word(split)} accuracy (%)")
    axes.grid(color=STYLE["grid"], linewidth=0.6)
    _legend(axes)
    return figure


def cosine_map(rows) -> Figure:
    """Cosines between the task vectors, (tasks, tasks), the mean over seeds."""
    chosen = results.select(rows, metric="cosine")
    names = list(dict.fromkeys([row["task"] for row in chosen] + [row["other"] for row in chosen]))
    matrix = np.eye(len(names))
    for (a, b), value in _means(chosen, "task", "other").items():
        i, j = names.index(a), names.index(b)
        matrix[i, j] = matrix[j, i] = value
    side = 1.6 + 0.34 * max(len(names), 5)
    figure, axes = plain(side + 0.9, side)
    off = np.abs(matrix[~np.eye(len(names), dtype=bool)])
    top = float(off.max()) if off.size and off.max() > 0 else 1.0
    shown = np.where(np.eye(len(names), dtype=bool), np.nan, matrix)
    image = axes.imshow(shown, cmap=colormaps["RdBu_r"], vmin=-top, vmax=top)
    for i in range(len(names)):
        for j in range(len(names)):
            if i != j:
                dark = abs(matrix[i, j]) > 0.6 * top
                axes.text(j, i, _short(matrix[i, j]), ha="center", va="center", fontsize=6.5 if len(names) > 10 else 8,
                          color="white" if dark else STYLE["text"])
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, shrink=0.8, label="cosine")
    return figure


def png(figure: Figure, *, dpi: int = 192) -> bytes:
    """The figure as the bytes of a PNG file, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", bbox_inches="tight", pad_inches=0.05,
                   metadata={"Software": None})
    return buffer.getvalue()


def data(figure: Figure) -> str:
    """What a figure shows as CSV: panel, kind, label, x, y, value (of a map's cell, a bar's height is its y)."""
    buffer = io.StringIO()
    lines = csv.writer(buffer, lineterminator="\n")
    lines.writerow(("panel", "kind", "label", "x", "y", "value"))
    for panel, axes in enumerate(figure.axes):
        lines.writerows((panel, *line) for line in _shown(axes))
    return buffer.getvalue()


def _shown(axes):
    for line in axes.get_lines():
        yield from (("line", line.get_label(), x, y, "") for x, y in zip(*line.get_data(), strict=True))
    for points in axes.collections:
        where = np.ma.getdata(points.get_offsets())
        if isinstance(points, PathCollection):
            yield from (("point", points.get_label(), *map(float, pair), "") for pair in where)
        elif isinstance(points, QuadMesh):
            values = np.ma.filled(np.ma.asarray(points.get_array(), float), np.nan).reshape(-1)
            yield from (("cell", "", *map(float, pair), float(v)) for pair, v in zip(where, values, strict=False))
    for bar in axes.patches:
        if isinstance(bar, Rectangle):
            yield "bar", bar.get_label(), bar.get_x() + bar.get_width() / 2, bar.get_y() + bar.get_height(), ""
    for image in axes.get_images():
        cells = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        yield from (("cell", "", j, i, cells[i, j]) for i, j in np.ndindex(*cells.shape[:2]) if cells.ndim == 2)


def plain(width: float, height: float):
    """(figure, axes) in the house's look."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[list(STYLE["spines"])].set_visible(False)
    axes.tick_params(labelsize=8.5)
    return figure, axes


def _legend(axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)


def _test(rows, metric: str, tasks: int):
    return results.select(rows, metric=metric, split="test", tasks=tasks)


def _means(rows, *keys):
    """{key or (key, …): mean value}, in order of appearance."""
    found: dict = {}
    for row in rows:
        found.setdefault(operator.itemgetter(*keys)(row), []).append(row["value"])
    return {key: sum(values) / len(values) for key, values in found.items()}


def _mean_std(rows, **equals):
    values = [row["value"] for row in results.select(rows, **equals)]
    return results.mean_std(values) if values else (math.nan, 0.0)


def _short(x: float) -> str:
    return f"{x:.2f}".replace("0.", ".", 1)


def _word(split: str) -> str:
    return {"val": "validation"}.get(split, split)
