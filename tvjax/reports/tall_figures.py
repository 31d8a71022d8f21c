"""Figures of masks and compression, drawn from rows alone: agreement, Consensus over k, λ, the number of tasks, bits.

As in `plotting`: every function returns a figure, several seeds appear as their mean and sample standard deviation.
"""
import math

import numpy as np
from matplotlib.figure import Figure

from tvjax import results
from tvjax.plotting import COLOURS, MARKERS, STYLE, plain

SHADES = {"merging": "-", "compression": "--"}


def agreement(rows, *, tasks: int) -> Figure:
    """α(n), the share of entries that n tasks' masks keep, a bar for each base."""
    chosen = results.select(rows, metric="agreement", by="all", tasks=tasks)
    names = list(dict.fromkeys(row["method"] for row in chosen))
    figure, axes = plain(1.6 + 0.5 * (tasks + 1), 3.4)
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        mean, spread = _line([row for row in chosen if row["method"] == name], "n")
        axes.bar(np.array(list(mean)) + (i - (len(names) - 1) / 2) * width, 100 * np.array(list(mean.values())), width,
                 yerr=100 * np.array(spread), label=name, color=COLOURS[i % len(COLOURS)], error_kw={"linewidth": 0.8})
    axes.set_xticks(range(tasks + 1))
    axes.set_xlabel("tasks whose mask keeps the entry (0 catastrophic, 1 selfish, ≥ 2 general)")
    axes.set_ylabel("entries (%)")
    axes.legend(frameon=False, fontsize=8)
    return figure


def profile_by(rows, *, tasks: int, by: str) -> Figure:
    """Shares of catastrophic, selfish and general entries by "layer" or "kind", a panel for each base."""
    chosen = results.select(rows, metric="class", by=by, tasks=tasks)
    names = list(dict.fromkeys(row["method"] for row in chosen))
    groups = list(dict.fromkeys(row["group"] for row in chosen))
    figure = Figure(figsize=(2.6 + 3.0 * len(names), 1.2 + 0.26 * len(groups)), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        left = np.zeros(len(groups))
        for colour, kind in zip(COLOURS, ("catastrophic", "selfish", "general"), strict=False):
            values = [_mean(results.select(chosen, method=name, group=group, **{"class": kind})) for group in groups]
            share = 100 * np.array(values)
            panel.barh(range(len(groups)), share, left=100 * left, color=colour, label=kind, height=0.8)
            left += values
        panel.set_yticks(range(len(groups)), groups, fontsize=7)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("entries (%)")
    panels[0].invert_yaxis()
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=7, ncols=3, loc="outside lower center")
    return figure


def over_k(rows, *, tasks: int) -> Figure:
    """Average normalised test accuracy of Consensus over k, a line for each base."""
    chosen = [row for row in _averages(rows, tasks) if "k" in row]
    return _lines(chosen, "base", "k", "k, the least number of tasks that need an entry")


def over_lambda(rows, *, tasks: int) -> Figure:
    """Average normalised validation accuracy under TALL-masks over λ, the same for all tasks; a line for each base."""
    return _lines(results.select(rows, metric="lambda", tasks=tasks), "method", "lam", "λ")


def over_tasks(rows) -> tuple[Figure, Figure]:
    """(normalised test accuracy, storage in 10⁹ bits) over the number of tasks; bands are ± one standard deviation over
    orders and seeds."""
    chosen = results.select(rows, metric="curve normalised")
    accuracy = _lines(chosen, "method", "tasks", "number of tasks", band=True)
    figure, axes = plain(5.6, 3.6)
    sizes = {row["method"]: "bits" for row in chosen} | {"fine-tuned": "bits_finetuned"}
    for i, (name, field) in enumerate(sizes.items()):
        mine = chosen if name == "fine-tuned" else results.select(chosen, method=name)
        counts = sorted({row["tasks"] for row in mine})
        mean = [np.mean([row[field] for row in mine if row["tasks"] == n]) / 1e9 for n in counts]
        axes.plot(counts, mean, marker=MARKERS[i % 8], color=COLOURS[i % 8], label=name, markersize=5)
    axes.set_xlabel("number of tasks")
    axes.set_ylabel("10⁹ bits")
    axes.grid(color=STYLE["grid"], linewidth=0.6)
    axes.legend(frameon=False, fontsize=7)
    return accuracy, figure


def pareto(rows, *, tasks: int) -> Figure:
    """Retained (normalised test) accuracy over bits for each weight and task, θ0 left out; a point for each codec."""
    chosen = [row for row in _averages(rows, tasks) if "bits_per_weight" in row]
    figure, axes = plain(6.4, 4.0)
    for i, name in enumerate(dict.fromkeys(row["method"] for row in chosen)):
        mine = results.select(chosen, method=name)
        values = [100 * row["value"] for row in mine]
        mean, spread = results.mean_std(values)
        axes.errorbar(np.mean([row["bits_per_weight"] for row in mine]), mean, spread,
                      marker=MARKERS[(i + i // 8) % 8], color=COLOURS[i % 8], label=name, markersize=6,
                      linestyle="none", linewidth=0.8)
    axes.axhline(100, color="#222222", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bits for each weight and task (32: task vectors as they are)")
    axes.set_ylabel("retained accuracy (%)")
    axes.grid(color=STYLE["grid"], linewidth=0.6)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


def radar(rows, *, tasks: int) -> Figure:
    """Normalised test accuracy of every task on a circle: merges as lines, compression dashed, the rim fine-tuned."""
    chosen = [row for row in results.select(rows, metric="normalised accuracy", split="test", tasks=tasks)
              if row.get("section") in SHADES and row["task"] != "average"]
    names = list(dict.fromkeys(row["task"] for row in chosen))
    angles = np.linspace(0, 2 * math.pi, len(names), endpoint=False)
    figure = Figure(figsize=(7.4, 5.6), layout="constrained")
    axes = figure.add_subplot(projection="polar")
    for i, method in enumerate(dict.fromkeys(row["method"] for row in chosen)):
        mine = results.select(chosen, method=method)
        ring = [100 * _mean(results.select(mine, task=task)) for task in names]
        axes.plot([*angles, angles[0]], [*ring, ring[0]], color=COLOURS[i % 8], linewidth=1.3, label=method,
                  linestyle=SHADES[mine[0]["section"]])
    axes.set_xticks(angles, names, fontsize=7)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


# ---------------------------------------------------------------- parts
def _averages(rows, tasks: int) -> list[dict]:
    return results.select(rows, metric="normalised accuracy", split="test", task="average", tasks=tasks)


def _lines(chosen, by: str, over: str, label: str, *, band: bool = False) -> Figure:
    figure, axes = plain(5.6, 3.6)
    for i, name in enumerate(dict.fromkeys(row[by] for row in chosen)):
        mean, spread = _line([row for row in chosen if row[by] == name], over)
        x, y, s = np.array(list(mean)), 100 * np.array(list(mean.values())), 100 * np.array(spread)
        axes.plot(x, y, marker=MARKERS[i % 8], color=COLOURS[i % 8], label=name, linewidth=1.6, markersize=5)
        if band or s.any():
            axes.fill_between(x, y - s, y + s, color=COLOURS[i % 8], alpha=0.15, linewidth=0)
    axes.set_xlabel(label)
    axes.set_ylabel("normalised accuracy (%)")
    axes.grid(color=STYLE["grid"], linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _line(chosen, over: str) -> tuple[dict, list[float]]:
    """({x: mean value}, spreads) in rising x."""
    found: dict = {}
    for row in chosen:
        found.setdefault(row[over], []).append(row["value"])
    pairs = {x: results.mean_std(found[x]) for x in sorted(found)}
    return {x: pair[0] for x, pair in pairs.items()}, [pair[1] for pair in pairs.values()]


def _mean(rows) -> float:
    return float(np.mean([row["value"] for row in rows])) if rows else 0.0
