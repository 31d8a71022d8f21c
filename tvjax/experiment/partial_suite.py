"""One way of fine-tuning and seed, judged: its single models, and every fusion of every subset of tasks.

Everything is chosen on the split `select_on`, per subset, and then judged once on the test split. Scores are absolute,
and normalised by the single models of the same way on the same split.
"""
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tvjax import evaluation, merging, tree
from tvjax.evaluation.mixtures import answers, expansion, mixtures
from tvjax.experiment import fusion, rows, study
from tvjax.experiment.partial_plan import PartialPlan
from tvjax.experiment.way_tuning import Trained
from tvjax.experiment.ways import Way

SPLITS = ("val", "test")


class Scores(NamedTuple):
    """At one row of coefficients: {task: accuracy} and {task: mean loss}."""

    accuracy: dict[str, float]
    loss: dict[str, float]


class Judged(NamedTuple):
    """A way with its task vectors. `stack`: of all tasks; `name` hashes way, base and vectors; `single`: {split: {task:
    accuracy}} of each task's own model; `counts`: [passes through the network, passes that the plain way takes];
    `kept`: expansions of splits, where features are affine."""

    bench: study.Bench
    way: Way
    stack: Any
    name: str
    single: dict[str, dict[str, float]]
    counts: list[int]
    kept: dict

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.bench.usual.tasks

    @property
    def todo(self) -> PartialPlan:
        return self.bench.todo


def judged(bench: study.Bench, way: Way, taus: dict[str, Trained]) -> Judged:
    """A way ready to be judged, the accuracies of its single models measured."""
    stack = jax.device_get(tree.stack([taus[task].tau for task in bench.usual.tasks]))
    told = (way.name, way.plan.kind, way.plan.scope, repr(way.plan.method))
    one = Judged(bench, way, stack, evaluation.content_key(*told, way.family.base, stack), {}, [0, 0], {})
    eye = np.eye(len(one.tasks))
    for split in SPLITS:
        one.single[split] = {task: scores(one, eye[i:i + 1], [task], split)[0].accuracy[task]
                             for i, task in enumerate(one.tasks)}
    bench.say(f"{way.name}, seed {bench.seed}: single models {100 * evaluation.absolute(one.single['test']):.1f} % of "
              f"test, {way.trained:,} trained numbers")
    return one


def scores(one: Judged, coefficients, tasks: Sequence[str], split: str, *, merged: Any = None) -> list[Scores]:
    """Accuracy and loss of every mixture on every task, from the cache where they are there.

    merged: a vector to scale in place of the tasks' own; the coefficients have then one column.
    """
    coefficients, other = np.asarray(coefficients, np.float32), merged is not None
    name = evaluation.content_key(one.name, merged) if other else one.name
    if other and not one.way.family.slopes:  # as a stack of all tasks, so that one program serves both
        stack = jax.tree.map(lambda x, all_: np.concatenate([np.asarray(x)[None], 0 * all_[1:]]), merged, one.stack)
        coefficients = np.pad(coefficients, ((0, 0), (0, len(one.tasks) - 1)))
    else:
        stack = tree.stack([merged]) if other else one.stack
    found = {}
    for task in tasks:
        head, data = one.bench.about.heads[task], tuple(one.bench.about.splits[task][split])
        where, metric = None if other else (task, split), one.bench.about.metrics.get(task, _share)
        measure = lambda head=head, data=data, where=where, metric=metric: _measure(
            one, stack, coefficients, head, data, where, metric)
        found[task] = evaluation.cached(one.bench.cache, measure, "mixtures", name, coefficients,
                                        one.bench.about.keys[task][split])
    at = lambda side, i: {task: pair[side][i] for task, pair in found.items()}
    return [Scores(at(0, i), at(1, i)) for i in range(len(coefficients))]


def _share(answers, labels) -> float:
    return float((answers == labels).mean())


def _measure(one: Judged, stack, coefficients, head, data, where, metric):
    """`where` names the split whose expansion is kept; None for a vector that comes once."""
    batch = one.bench.usual.batch
    if one.way.family.slopes and where:
        if where not in one.kept:
            one.kept[where] = expansion(one.way.family, stack, data[0], batch=batch)
            one.counts[0] += one.kept[where].passes
        made = answers(one.kept[where], coefficients, head, data[1], batch=batch)
    else:
        made = mixtures(one.way.family, stack, coefficients, head, data, batch=batch)
        one.counts[0] += made.passes
    one.counts[1] += len(coefficients)
    judged = [metric(answers, np.asarray(data[1])) for answers in made.classes]
    return [judged, np.minimum(made.losses.mean(1), 1e9).tolist()]


# ---------------------------------------------------------------- rows
def tuning_rows(one: Judged, taus: dict[str, Trained]) -> list[dict]:
    """The single models: accuracies, seconds and rates of training, numbers trained."""
    shared = _shared(one, one.tasks)
    found = [{"metric": metric, "value": value, "method": one.way.name, "task": task, "split": "none", **shared,
              "part": "tuning"} for task, made in taus.items()
             for metric, value in (("seconds", made.seconds), ("examples per second", made.rate))]
    found.append({"metric": "trained", "value": one.way.trained, "method": one.way.name, "task": rows.AVERAGE,
                  "split": "none", **shared, "part": "tuning"})
    return found + rows.accuracies(shared, one.way.name, one.single, one.single, part="single")


def fusion_rows(one: Judged) -> list[dict]:
    """Every fusion of every subset."""
    found = []
    for size in one.todo.sizes:
        for subset in fusion.subsets(len(one.tasks), size, most=one.todo.most):
            for name in one.todo.fusions:
                found += _fused(one, name, subset)
        _say(one, found, size)
    return found


def _fused(one: Judged, name: str, subset: tuple[int, ...]) -> list[dict]:
    tasks = [one.tasks[i] for i in subset]
    if name == "ties":
        chosen, at, merged = _ties(one, subset, tasks)
    else:
        chosen, merged = CHOOSE[name](one, judge(one, tasks), subset), None
        at = {"coefficients": [round(float(x), 6) for x in chosen.row]}
    accuracy = scores(one, chosen.row[None], tasks, "test", merged=merged)[0].accuracy
    whole = {task: one.single["test"][task] for task in tasks}
    shared = {"method": f"{one.way.name}: {name}", "split": "test", "task": rows.AVERAGE, **_shared(one, tasks),
              "part": "fusion", "way": one.way.name, "fusion": name, "subset": "+".join(tasks), "asked": chosen.asked,
              **at}
    found = [{"metric": "accuracy", "value": evaluation.absolute(accuracy), **shared},
             {"metric": "normalised accuracy", "value": evaluation.normalised(accuracy, whole), **shared}]
    if len(tasks) == len(one.tasks):
        found += [{**shared, "metric": "accuracy", "value": value, "task": task} for task, value in accuracy.items()]
    return found


def judge(one: Judged, tasks: Sequence[str]) -> fusion.Judge:
    """What a fusion may ask about rows of coefficients: scores on the split that selects, all of these tasks."""
    split = one.bench.usual.select_on
    own = {task: one.single[split][task] for task in tasks}

    def ask(coefficients):
        found = scores(one, coefficients, tasks, split)
        return (np.array([evaluation.normalised(made.accuracy, own) for made in found]),
                np.array([evaluation.absolute(made.loss) for made in found]))
    return ask


def _ties(one: Judged, subset, tasks) -> tuple[fusion.Chosen, dict, Any]:
    """The best of densities × scales, the first of equals, and the merged vector."""
    split = one.bench.usual.select_on
    own = {task: one.single[split][task] for task in tasks}
    grid = np.array(one.todo.ties["scales"])[:, None]
    best: Any = None
    every = tree.unstack(one.stack)
    for density in one.todo.ties["densities"]:
        merged = merging.build("ties", {"density": density, "scale": 1.0})([every[i] for i in subset])
        merged = jax.device_get(merged)
        values = [evaluation.normalised(made.accuracy, own) for made in scores(one, grid, tasks, split, merged=merged)]
        i = int(np.argmax(values))
        if best is None or values[i] > best[0]:
            best = (values[i], density, grid[i], merged)
    value, density, row, merged = best
    asked = len(grid) * len(one.todo.ties["densities"])
    return fusion.Chosen(row, value, asked), {"density": density, "scale": float(row[0])}, merged


CHOOSE: dict[str, Callable] = {
    "average": lambda one, ask, subset: fusion.average(subset, len(one.tasks)),
    "task_arithmetic": lambda one, ask, subset: fusion.task_arithmetic(ask, subset, len(one.tasks), one.todo.scales),
    "greedy": lambda one, ask, subset: fusion.greedy(ask, subset, len(one.tasks), one.todo.greedy),
    "lorahub": lambda one, ask, subset: fusion.lorahub(ask, subset, len(one.tasks), seed=one.bench.seed,
                                                       **one.todo.lorahub),
}


def _say(one: Judged, found: list[dict], size: int) -> None:
    for name in one.todo.fusions:
        mean = lambda metric, name=name: 100 * float(np.mean([
            row["value"] for row in found if row["metric"] == metric and row["tasks"] == size and row["fusion"] == name
            and row["task"] == rows.AVERAGE]))
        one.bench.say(f"{one.way.name}, seed {one.bench.seed}: {name} of {size} tasks, test {mean('accuracy'):.1f} % "
                      f"({mean('normalised accuracy'):.1f} % normalised)")


def _shared(one: Judged, tasks) -> dict[str, Any]:
    return one.bench.common(list(tasks))


def cache_path(folder: pathlib.Path, way: str, seed: int) -> pathlib.Path:
    """The file of what was measured of a way and seed."""
    return folder / "cache" / f"{way}-seed{seed}.jsonl"
