"""Sections that the reports of the jobs llora and tangent share: ways of fine-tuning side by side.

Numbers are means ± deviations over seeds.
"""
from typing import Any

import numpy as np

from tvjax import results
from tvjax.reports import Section, figures
from tvjax.reports.grouping import spread

AVERAGE = "average"
TITLES = {"average": "simple average", "task_arithmetic": "task arithmetic", "ties": "TIES", "lorahub": "LoRAHub",
          "greedy": "greedy task arithmetic"}
ON_TEST = ("Coefficients were chosen on the TEST split, for every subset, as the authors' code does: the scores below "
           "are not those of a method that has not seen the test data.")


def part(rows, name: str, **equals) -> list[dict]:
    """The rows of a part with these fields."""
    return [row for row in rows if row.get("part") == name and all(row.get(k) == v for k, v in equals.items())]


def names(rows, field: str = "method") -> list:
    return list(dict.fromkeys(row[field] for row in rows))


def cell(rows, **equals):
    """Mean and deviation over seeds of the mean over all else."""
    chosen = [row for row in rows if all(row.get(k) == v for k, v in equals.items())]
    of = lambda seed: float(np.mean([row["value"] for row in chosen if row["seed"] == seed]))
    return spread([of(seed) for seed in names(chosen, "seed")])


def alarms(run) -> tuple[str, ...]:
    return (ON_TEST,) if run.config["select_on"] == "test" else ()


def single(run) -> Section:
    """The models of one task each, by each way, and what they cost."""
    chosen = part(run.rows, "single", metric="accuracy", split="test")
    tasks = [task for task in names(chosen, "task") if task != AVERAGE]
    lines = [(way, cell(chosen, method=way, task=AVERAGE), *(cell(chosen, method=way, task=task) for task in tasks))
             for way in names(chosen)]
    return Section("Single-task models", "Test accuracy in percent of the model of each task, by way of fine-tuning.",
                   {"Test accuracy (%)": results.Table(("way", AVERAGE, *tasks), tuple(lines))})


def cost(run) -> Section:
    """Trained numbers, seconds and rates."""
    chosen = part(run.rows, "tuning")
    lines = [(way, f"{int(part(chosen, 'tuning', method=way, metric='trained')[0]['value']):,}",
              cell(chosen, method=way, metric="seconds"), cell(chosen, method=way, metric="examples per second"))
             for way in names(chosen)]
    sweeps = [f"{row['method']}, seed {row['seed']}: {int(row['value'])} passes of a split through the network in "
              f"place of {int(row['plain'])}, since its features are affine in the coefficients."
              for row in part(run.rows, "sweep")]
    return Section("Cost", "", {"Fine-tuning of one task": results.Table(
        ("way", "trained numbers", "seconds", "examples per second"), tuple(lines))}, notes=sweeps, scale=1.0, digits=1)


def fusions(run) -> Section:
    """Every fusion by every way over the number of tasks: normalised and absolute, means over subsets."""
    chosen = [row for row in part(run.rows, "fusion") if row["task"] == AVERAGE]
    sizes = sorted({row["tasks"] for row in chosen})
    counts = {n: len({row["subset"] for row in chosen if row["tasks"] == n}) for n in sizes}
    tables, drawn = {}, {}
    for metric, title in (("normalised accuracy", "Normalised by the way's own single models"),
                          ("accuracy", "Absolute")):
        lines = tuple((f"{TITLES[fusion]}, {way}", *(cell(chosen, metric=metric, way=way, fusion=fusion, tasks=n)
                                                     for n in sizes))
                      for fusion in names(chosen, "fusion") for way in names(chosen, "way"))
        tables[f"{title} test accuracy (%)"] = results.Table(("fusion, way", *(f"n = {n}" for n in sizes)), lines)
    for fusion in names(chosen, "fusion"):
        series = {way: {n: [100 * x for x in _by_seed(chosen, way, fusion, n)] for n in sizes}
                  for way in names(chosen, "way")}
        drawn[f"{TITLES[fusion]}: normalised test accuracy over the number of tasks"] = figures.lines(
            series, x="number of tasks", y="normalised accuracy (%)")
    split = {"val": "validation"}.get(run.config["select_on"], run.config["select_on"])
    words = (f"Means over subsets of n tasks ({', '.join(f'{counts[n]} of n = {n}' for n in sizes)}), coefficients "
             f"chosen for every subset on the {split} split. Normalised scores divide by the same way's single models.")
    return Section("Fusion", words, tables, drawn, alarms=alarms(run))


def _by_seed(chosen, way, fusion, n):
    mine = [row for row in chosen if row["metric"] == "normalised accuracy" and row["way"] == way
            and row["fusion"] == fusion and row["tasks"] == n]
    return [float(np.mean([row["value"] for row in mine if row["seed"] == seed])) for seed in names(mine, "seed")]


def geometry(run) -> Section:
    """Cosines and pair-wise ξ of task vectors."""
    cosines, pairs = part(run.rows, "cosines"), part(run.rows, "pairs")
    lines = [(way, cell(cosines, method=way, metric="mean cosine"), cell(cosines, method=way, metric="mean |cosine|"),
              cell(pairs, method=way, metric="mean xi pair")) for way in names(cosines)]
    cosine_map = lambda way, turn=lambda x: x: figures.heat_map(
        turn(_square(cosines, "cosine", way, symmetric=True)), **_tasks(cosines, "cosine", way), label="cosine",
        diverging=True)
    xi_map = lambda way: figures.heat_map(_square(pairs, "xi pair", way, symmetric=False),
                                          **_tasks(pairs, "xi pair", way), label="ξ")
    drawn = {f"{way}: cosines of task vectors": cosine_map(way) for way in names(cosines)}
    drawn |= {f"{way}: magnitudes of the cosines": cosine_map(way, np.abs) for way in names(cosines)}
    drawn |= {f"{way}: pair-wise ξ, share of answers on the row's data that the column's vector changes": xi_map(way)
              for way in names(pairs)}
    return Section("Geometry", "Means over all pairs of tasks, each in the space that the way trains.",
                   {"Cosines and disentanglement": results.Table(("way", "cosine", "|cosine|", "pair-wise ξ"),
                                                                 tuple(lines))}, drawn, scale=1.0, digits=3)


def _tasks(rows, metric, way) -> dict[str, Any]:
    mine = [row for row in rows if row["metric"] == metric and row["method"] == way]
    every = list(dict.fromkeys([row["task"] for row in mine] + [row["other"] for row in mine]))
    return {"rows": every, "columns": every}


def _square(rows, metric, way, *, symmetric: bool) -> np.ndarray:
    every = _tasks(rows, metric, way)["rows"]
    matrix = np.eye(len(every)) if symmetric else np.zeros((len(every), len(every)))
    for i, a in enumerate(every):
        for j, b in enumerate(every):
            found = [row["value"] for row in rows if row["metric"] == metric and row["method"] == way
                     and (row["task"], row["other"]) in ({(a, b), (b, a)} if symmetric else {(a, b)})]
            matrix[i, j] = np.mean(found) if found else matrix[i, j]
    return matrix


def planes(run) -> Section:
    """ξ maps and loss landscapes of pairs of tasks."""
    rows, drawn, lines = part(run.rows, "plane"), {}, []
    for way in names(rows):
        for a, b in dict.fromkeys((row["task"], row["other"]) for row in rows):
            mine = [row for row in rows if row["method"] == way and (row["task"], row["other"]) == (a, b)]
            at = lambda metric, mine=mine: _grid([row for row in mine if row["metric"] == metric])
            grid, xi = at("xi")
            joint = (at("loss first")[1] + at("loss second")[1]) / 2
            axes = {"xs": grid, "ys": grid, "x": f"α of {b}", "y": f"α of {a}", "box": 1.0}
            drawn[f"{way}: ξ of {a} and {b}"] = figures.surface(xi, label="ξ", **axes)
            drawn[f"{way}: mean loss of {a} and {b}"] = figures.surface(
                joint, label="cross-entropy", logarithmic=bool((joint > 0).all()), **axes,
                marks={"θ0": (0.0, 0.0), a: (0.0, 1.0), b: (1.0, 0.0)})
            inside = (grid >= 0) & (grid <= 1)
            lines.append((f"{way}, {a} and {b}", float(xi[np.ix_(inside, inside)].mean()), float(xi.mean())))
    words = ("ξ(α₁, α₂): the share of test answers of each of two tasks that the other's vector changes, summed; the "
             "dashed box is the region [0, 1]² where α is searched. First seed.")
    return Section("The plane of two task vectors", words, {"ξ, means over grid points": results.Table(
        ("way, tasks", "in the box", "whole map"), tuple(lines))}, drawn, scale=1.0, digits=3)


def _grid(rows) -> tuple[np.ndarray, np.ndarray]:
    """(grid, matrix[α₁, α₂])."""
    grid = np.array(sorted({row["alpha1"] for row in rows}))
    value = {(row["alpha1"], row["alpha2"]): row["value"] for row in rows}
    return grid, np.array([[value[a, b] for b in grid] for a in grid])


def linearity(run) -> Section:
    """Tuned models beside their linearisations at θ0."""
    rows = part(run.rows, "scatter", metric="post-hoc linear accuracy")
    gains = part(run.rows, "scatter", metric="nonlinear advantage")
    lines = tuple((task, cell(rows, task=task), spread([row["tuned"] for row in rows if row["task"] == task]),
                   cell(gains, task=task)) for task in names(rows, "task"))
    drawn = figures.scatter({task: ([100 * row["value"] for row in rows if row["task"] == task],
                                    [100 * row["tuned"] for row in rows if row["task"] == task])
                             for task in names(rows, "task")},
                            x="post-hoc linearised accuracy (%)", y="tuned accuracy (%)", bisector=True)
    return Section("How linear tuned models are", "The model f(x; θ0) + ∇f(x; θ0)·τ with the τ of standard "
                   "fine-tuning, beside f(x; θ0 + τ); advantage = (tuned − linear)/(1 − 1/classes).",
                   {"Test accuracy (%)": results.Table(("task", "linearised", "tuned", "advantage"), lines)},
                   {"Tuned over linearised accuracy, with the bisector": drawn})


def negation(run) -> Section:
    """−α·τ by way: what is forgotten of the target, what stays of the control."""
    rows = part(run.rows, "negation")
    of = lambda way, what: cell(rows, method=way, metric=f"negated {what}")
    lines = tuple((way, of(way, "target"), of(way, "control")) for way in names(rows))
    return Section("Negation", "Means over tasks of θ0 − λτ, λ chosen to lower the target while the control keeps 95 % "
                   "of its zero-shot accuracy on the split that selects.",
                   {"Test accuracy (%)": results.Table(("way", "target", "control"), lines)})


def scaling(run) -> Section:
    """Fusion over the number of trained numbers."""
    rows = part(run.rows, "scaling")
    mine = [row for row in rows if row["metric"] == "normalised accuracy"]
    drawn = {f"Over trained numbers: {TITLES[fusion]}, normalised test accuracy": figures.lines(
        {way: {row["trained"]: [100 * other["value"] for other in mine if other["way"] == way
                                and other["trained"] == row["trained"] and other["fusion"] == fusion]
               for row in sorted((row for row in mine if row["way"] == way), key=lambda row: row["trained"])}
         for way in names(mine, "way")}, x="trained numbers", y="normalised accuracy (%)", log=True)
        for fusion in names(mine, "fusion")}
    columns = [(metric, fusion) for metric in ("accuracy", "normalised accuracy")
               for fusion in (["single"] if metric == "accuracy" else []) + names(mine, "fusion")]
    lines = tuple((f"{way}, r = {rank}", *(cell(rows, way=way, rank=rank, metric=metric, fusion=fusion)
                                           for metric, fusion in columns))
                  for way in names(rows, "way") for rank in sorted({row["rank"] for row in rows}))
    ending = {"accuracy": "", "normalised accuracy": ", normalised"}
    heads = [TITLES.get(fusion, fusion) + ending[metric] for metric, fusion in columns]
    return Section("Numbers trained", "Adapters of growing rank, α growing with it.",
                   {"Test accuracy (%)": results.Table(("way", *heads), lines)}, drawn)


def chosen(run, *makers) -> list[Section]:
    """The sections of the parts that the run has rows of."""
    needs = {single: "single", cost: "tuning", fusions: "fusion", geometry: "cosines", planes: "plane",
             linearity: "scatter", negation: "negation", scaling: "scaling"}
    return [make(run) for make in makers if part(run.rows, needs[make])]
