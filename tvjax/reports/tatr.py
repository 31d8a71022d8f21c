"""The report of trust regions: merges with and without them, ablations, Ω, knowledge conflicts."""
import statistics

import numpy as np

from tvjax import results
from tvjax.reports import Section, figures
from tvjax.reports.grouping import by, grouped, spread

FORMS = {"TATR": "TATR", "zero-shot TATR": "zero-shot TATR"}
NOTE = ("Test accuracy in percent, normalised: the mean over tasks of accuracy over that of the model fine-tuned on "
        "the task alone. α of every row is the first best on validation data. Several seeds: mean ± deviation.")


def sections(run) -> list[Section]:
    """The main tables for each number of tasks, then the ablations."""
    rows = run.rows
    made = [_main(rows, count) for count in sorted({row["tasks"] for row in rows if row.get("section") == "main"})]
    parts = (("forms", _forms), ("quantiles", _quantiles), ("exemplars", _exemplars))
    made += [draw(rows) for section, draw in parts if any(row.get("section") == section for row in rows)]
    made.append(_omega(rows))
    made += [_conflicts(rows)] if any(row["metric"] == "conflict" for row in rows) else []
    seconds = results.select(rows, metric="seconds", method="all")[0]["value"]
    made.append(Section("Cost", f"This run, all that was not reused: {seconds:.0f} s on {run.header['device']}."))
    return made


def averages(rows, section: str, metric: str = "accuracy") -> list[dict]:
    """The average test accuracies of a section."""
    return [row for row in results.select(rows, metric=metric, split="test", task="average")
            if row.get("section") == section]


def _main(rows, count: int) -> Section:
    return Section(f"{count} tasks: merges with and without the trust region", "",
                   {"gain by the region (points of test accuracy, the same seed and base)": gains(rows, count),
                    **grouped(rows, tasks=count, section=("main", "statistics"))},
                   {f"accuracy of {count} tasks": _bars(rows, count)}, (NOTE,))


def gains(rows, count: int) -> results.Table:
    """What each region adds to each base, paired by seed."""
    mine = [row for row in averages(rows, "main") if row["tasks"] == count]
    at = {(row["base"], row["form"], row["seed"]): row["value"] for row in mine}
    lines = []
    for base in dict.fromkeys(row["base"] for row in mine):
        seeds = sorted({row["seed"] for row in mine if row["base"] == base})
        cells = [spread([at[base, form, seed] - at[base, "", seed] for seed in seeds if (base, form, seed) in at])
                 for form in FORMS]
        lines.append((base, spread([at[base, "", seed] for seed in seeds]), *cells))
    return results.Table(("base", "alone", *(f"+ {form}" for form in FORMS)), tuple(lines))


def _bars(rows, count: int):
    mine = [row for row in averages(rows, "main") if row["tasks"] == count]
    groups: dict = {}
    for row in mine:
        groups.setdefault(row["form"] or "alone", {}).setdefault(row["base"], []).append(100 * row["value"])
    return figures.bars(groups, y="test accuracy (%)")


def _forms(rows) -> Section:
    count = max(row["tasks"] for row in averages(rows, "forms"))
    return Section("Other regions, on the sum of task vectors",
                   "Gradients of other losses and reductions, one region for each pair of tasks, entries of the "
                   "largest magnitude removed, and steps scaled by whether they descend.",
                   grouped(rows, tasks=count, section="forms", anchors=False))


def _quantiles(rows) -> Section:
    mine = averages(rows, "quantiles")
    series: dict = {}
    for row in mine:
        series.setdefault(row["method"], {}).setdefault(row["quantile"], []).append(100 * row["value"])
    return Section("Over the quantile", "", {"test accuracy (%)": by(mine, "accuracy", index="method",
                                                                      columns="quantile")},
                   {"accuracy over the quantile": figures.lines(series, x="quantile of Ω that is kept",
                                                                y="test accuracy (%)")})


def _exemplars(rows) -> Section:
    mine, series, lines = averages(rows, "exemplars"), {}, []
    for count in sorted({row["count"] for row in mine}):
        values = [row["value"] for row in mine if row["count"] == count]
        draws = [[row["value"] for row in mine if row["count"] == count and row["seed"] == seed]
                 for seed in sorted({row["seed"] for row in mine})]
        inside = statistics.fmean(statistics.stdev(one) if len(one) > 1 else 0.0 for one in draws)
        lines.append((str(count), spread(values), inside))
        series[count] = [100 * value for value in values]
    table = results.Table(("exemplars a task", "accuracy, all draws and seeds", "deviation over draws"), tuple(lines))
    return Section("Over exemplars and their draws", "At the α of the main region.", {"test accuracy (%)": table},
                   {"accuracy over exemplars": figures.lines({"TATR": series}, x="exemplars a task",
                                                             y="test accuracy (%)", log=True)}, digits=2)


def _omega(rows) -> Section:
    chosen = results.select(rows, metric="omega histogram")
    seed = min(row["seed"] for row in chosen)
    most = max(row["tasks"] for row in chosen)
    mine = results.select(chosen, seed=seed, tasks=most)
    lows = sorted({row["low"] for row in mine})
    edges = np.array([*lows, max(row["high"] for row in mine)])
    counts = {name: [100 * row["value"] for row in sorted(results.select(mine, method=name), key=lambda r: r["low"])]
              for name in dict.fromkeys(row["method"] for row in mine)}
    shares = [row for row in rows if row["metric"] in ("kept share", "zero share") and row["tasks"] == most]
    return Section("Ω over the entries", "The sum over pairs of tasks of |gradient · task vector|, entry by entry.",
                   {"entries (%)": _pivot(shares)},
                   {"histogram of omega": figures.histogram(np.log10(edges), counts, x="log₁₀ Ω", y="entries (%)")},
                   digits=2)


def _pivot(rows) -> results.Table:
    several = len({row["seed"] for row in rows}) > 1
    return results.pivot(rows, columns="metric", reduce=results.mean_std if several else statistics.fmean)


def _conflicts(rows) -> Section:
    chosen = results.select(rows, metric="conflict")
    drawn = {}
    for method in dict.fromkeys(row["method"] for row in chosen):
        mine = results.select(chosen, method=method)
        names = list(dict.fromkeys(row["other"] for row in mine))
        matrix = np.full((len(names), len(names)), np.nan)
        for i, out in enumerate(names):
            for j, task in enumerate(names):
                values = [row["value"] for row in mine if row["other"] == out and row["task"] == task]
                matrix[i, j] = 100 * statistics.fmean(values) if values else np.nan
        drawn[f"conflicts under {method}"] = figures.heat_map(
            matrix, rows=names, columns=names, label="points", x="accuracy on", y="with and without", diverging=True,
            digits=1)
    means = [row for row in rows if row["metric"] == "mean conflict"]
    several = len({row["seed"] for row in means}) > 1
    table = results.pivot(means, columns="metric", reduce=results.mean_std if several else statistics.fmean)
    return Section("Knowledge conflicts",
                   "KC[i, j]: accuracy on j of the merge of all tasks less that of the merge without task i, both at "
                   "the α of all. Negative: task i disturbs task j.",
                   {"mean of all pairs (points)": table}, drawn, digits=2)
