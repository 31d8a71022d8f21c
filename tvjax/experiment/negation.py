"""Task negation: θ0 − α·τ is to forget the task and to keep a control task, for any way of fine-tuning.

α is the scale of a grid with the least validation accuracy on the task among those that keep 95 % of the zero-shot
validation accuracy on the control task; both are then reported on test data (arXiv:2212.04089, arXiv:2305.12827).
"""
from typing import Any, NamedTuple

from tvjax import evaluation
from tvjax.experiment import rows

THRESHOLD = 0.95


class Negated(NamedTuple):
    """`scale` ≥ 0 is that of −τ; `target` and `control` {split: accuracy} there; `trace` (scale, target, control)."""

    scale: float
    target: dict[str, float]
    control: dict[str, float]
    trace: tuple


def negate(bench, tau, task: str, *, scales, threshold: float = THRESHOLD) -> Negated:
    """The negation of one task vector.

    bench: a `study.Bench` whose problem has a control task. scales: the grid of α, 0 added where it lacks.

    Raises:
      ValueError: where the problem has no control task.
    """
    about = bench.about
    if about.control is None:
        raise ValueError("task negation needs a control task, and this suite names none")
    pair, grid = [task, about.control], tuple(sorted({0.0, *map(float, scales)}))
    val = evaluation.cached(
        bench.cache, lambda: evaluation.sweep(about.judging, about.theta0, tau, [-scale for scale in grid],
                                              about.judged(pair, "val"), batch=bench.usual.batch,
                                              place=about.place),
        "negation", *about.told(), tau, list(grid), [about.keys[name]["val"] for name in pair])
    at = dict(zip(grid, val, strict=True))
    found = evaluation.search_negation(lambda s: at[s][task], lambda s: at[s][about.control], grid,
                                       control_at_zero=at[0.0][about.control], threshold=threshold)
    theta = evaluation.moved(about.theta0, tau, -found.best)
    test = bench.measure(theta, pair, "test")
    return Negated(found.best, {"val": at[found.best][task], "test": test[task]},
                   {"val": at[found.best][about.control], "test": test[about.control]}, found.trace)


def negation_rows(shared: dict, method: str, found: dict[str, Negated], **more) -> list[dict]:
    """Rows of all tasks' negations and their averages: metrics "target" and "control", with the scale."""
    made, base = [], {"method": method, "section": "negation", **shared, **more}
    for split in ("val", "test"):
        for metric in ("target", "control"):
            values = {task: getattr(one, metric)[split] for task, one in found.items()}
            made += [{"metric": metric, "value": value, "task": task, "split": split, "scale": found[task].scale,
                      **base} for task, value in values.items()]
            made.append({"metric": metric, "value": evaluation.absolute(values), "task": rows.AVERAGE, "split": split,
                         **base})
    made += [{"metric": "negation trace", "value": target, "task": task, "split": "val", "scale": scale,
              "control": control, **base} for task, one in found.items() for scale, target, control in one.trace]
    return made


def zero_shot_rows(bench, tasks) -> list[dict]:
    """The pretrained model by the same two numbers."""
    theta0, control = bench.about.theta0, bench.about.control
    made = []
    for split in ("val", "test"):
        target, kept = bench.measure(theta0, list(tasks), split), bench.measure(theta0, [control], split)
        base = {"method": "zero-shot", "section": "negation", "split": split, "scale": 0.0, **bench.common(tasks)}
        for task, value in {**target, rows.AVERAGE: evaluation.absolute(target)}.items():
            made += [{"metric": "target", "value": value, "task": task, **base},
                     {"metric": "control", "value": kept[control], "task": task, **base}]
    return made


def average(found: dict[str, Negated], metric: str, split: str) -> float:
    """The mean over tasks of "target" or "control"."""
    values: dict[str, Any] = {task: getattr(one, metric)[split] for task, one in found.items()}
    return evaluation.absolute(values)
