"""Merges that adapt without labels: AdaMerging (arXiv:2310.02575) and Representation Surgery (arXiv:2402.02705).

For every seed: task arithmetic with and without a trust region; AdaMerging with one coefficient a vector or a tensor,
on vectors as they are, after TIES, or behind a trust region; Surgery on what the plan names. What saw inputs of the
test split says so in its rows, and tables keep it apart.
"""
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import evaluation, learning, merging, tree, vectors
from tvjax.experiment import rows, study
from tvjax.experiment.adamerging_plan import AdaPlan, Method, adamerging_plan, baseline_label
from tvjax.experiment.columns import columns
from tvjax.experiment.study import SPLITS, Bench
from tvjax.experiment.tatr_suite import Regions, judge, merge
from tvjax.learning import adamerging, surgery

plan = adamerging_plan
__all__ = ["plan", "run"]


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole job in `folder` and returns its rows, which are then in `folder`/results.jsonl."""
    todo, folder = plan(config), pathlib.Path(folder)
    return study.run(config, todo.usual, folder, say=say, seed_rows=lambda about, seed, timed: _seed(
        about, todo, seed, folder, timed, progress))


def _seed(about, todo: AdaPlan, seed, folder, say, progress) -> list[dict]:
    bench = Bench(about, todo.usual, folder / "cache" / f"seed{seed}.jsonl", seed, say, todo)
    taus = study.task_vectors(bench, folder, theirs=todo.vectors, progress=progress)
    anchors = study.anchors(bench, taus)
    regions = Regions(bench, folder / "gradients", tuple(taus))
    found = [row for name, accuracy in anchors.items()
             for row in rows.accuracies(bench.common(tuple(taus)), name, accuracy, anchors["fine-tuned"],
                                        section="anchor", **columns(todo.usual, data="none"))]
    models = {}
    for region in todo.baselines:
        made, theta = baseline(bench, regions, region, taus, anchors)
        found, models[baseline_label(region)] = found + made, theta
    for method in todo.methods:
        made, theta = adapted(bench, regions, method, taus, anchors)
        found, models[method.label] = found + made, theta
    for name in todo.surgery["on"]:
        found += operated(bench, name, models[name], taus, anchors)
    return found


def region_of(bench: Bench, regions: Regions, region: str):
    """(operator, its data, its columns)."""
    quantile = bench.todo.quantile
    if region == "none":
        return merging.identity(), {}, columns(bench.usual, data="none")
    if region == "vectors":
        return merging.trust_region(quantile=quantile, by="vectors"), {}, columns(bench.usual, data="none")
    return merging.trust_region(quantile=quantile), {"gradients": regions.usual()}, regions.data()


def baseline(bench: Bench, regions: Regions, region: str, taus, anchors):
    """(rows, θ) of task arithmetic behind a region, α on validation data."""
    operator, given, about = region_of(bench, regions, region)
    make, tasks, label = merge(operator | merging.total(), taus, given), tuple(taus), baseline_label(region)
    made, scale = judge(bench, label, "training-free", make, tasks, anchors,
                        scales=planned_scales(bench), **about)
    return made, jax.device_get(evaluation.moved(bench.about.theta0, make(), scale))


def planned_scales(bench: Bench) -> tuple[float, ...]:
    """The usual grid of α, that of the plan's first merge which searches."""
    return next(one.scales for one in bench.usual.merges if one.scales is not None)


def adapted(bench: Bench, regions: Regions, method: Method, taus, anchors):
    """(rows, θ) of one AdaMerging: accuracies, entropies, traces and final coefficients."""
    todo, about, tasks = bench.todo, bench.about, tuple(taus)
    operator, given, region = region_of(bench, regions, method.region)
    operator = operator | (merging.top(density=todo.density) | merging.agree() if method.ties else merging.identity())
    stack = operator(list(taus.values()), tasks=tasks, **given) if operator.stages else None
    held = learning.pool(list(taus.values()) if stack is None else tree.unstack(stack), about.theta0, store=todo.store)
    inputs = {task: (about.heads[task], about.splits[task][todo.adapt_on][0]) for task in tasks}
    found = adamerging.adapt(about.predict, about.theta0, held, inputs, by=method.by, steps=todo.steps, lr=todo.lr,
                             batch=todo.batch, batches=todo.batches, value=todo.value, seed=bench.seed)
    theta = adamerging.merged(about.theta0, held, found.coefficients)
    seen = f"unlabelled {todo.adapt_on} inputs" + (f", {region['seen']}" if given else "")
    kind = "test" if todo.adapt_on == "test" else region["data"] if given else "unlabelled"
    return _judged(bench, method.label, "adapted", theta, tasks, anchors, seconds=None,
                   **columns(todo.usual, data=kind, seen=seen)) + _traces(bench, method, found, held, tasks), theta


def _judged(bench: Bench, label, section, theta, tasks, anchors, *, seconds, **more) -> list[dict]:
    accuracy = {split: bench.measure(theta, tasks, split) for split in SPLITS}
    return _told(bench, label, section, accuracy, tasks, anchors, **more)


def _told(bench: Bench, label, section, accuracy, tasks, anchors, **more) -> list[dict]:
    test, whole = accuracy["test"], anchors["fine-tuned"]["test"]
    bench.say(f"{label}, {len(tasks)} tasks, seed {bench.seed}: test {100 * evaluation.absolute(test):.1f} % "
              f"({100 * evaluation.normalised(test, whole):.1f} % normalised)")
    return rows.accuracies(bench.common(tasks), label, accuracy, anchors["fine-tuned"], section=section, **more)


def _traces(bench: Bench, method: Method, found, held, tasks) -> list[dict]:
    shared = {"method": method.label, "split": bench.todo.adapt_on, **bench.common(tasks)}
    made = []
    for step, coefficients in found.trace:
        spread = adamerging.by_task(coefficients, held)
        mean = np.mean([spread[name] for name in spread], axis=0)
        made += [{"metric": "coefficient trace", "value": float(value), "task": task, "step": step, **shared}
                 for task, value in zip(tasks, mean, strict=True)]
    window = max(1, len(found.losses) // 50)
    for start in range(0, len(found.losses), window):
        value = float(found.losses[start : start + window].mean()) / (len(tasks) * bench.todo.batches)
        made.append({"metric": "entropy", "value": value, "task": rows.AVERAGE, "step": start, **shared})
    final = adamerging.by_task(found.coefficients, held)
    if method.by == "tensor":
        made += [{"metric": "coefficient", "value": float(value), "task": task, "tensor": name, **shared}
                 for name, values in final.items() for task, value in zip(tasks, values, strict=True)]
    return made


# ---------------------------------------------------------------- Surgery
def operated(bench: Bench, name: str, theta, taus, anchors) -> list[dict]:
    """Rows of a merged model with a small module a task on its features."""
    todo, about, tasks, own = bench.todo, bench.about, tuple(taus), bench.todo.surgery
    accuracy: dict[str, dict] = {split: {} for split in SPLITS}
    added = 0
    for task in tasks:
        tuned = vectors.add(about.theta0, taus[task])
        inputs = about.splits[task][todo.adapt_on][0]
        sides = [evaluation.features(about.encode, params, inputs, batch=bench.usual.batch)
                 for params in (theta, tuned)]
        repair, _ = surgery.train(*sides, rank=own["rank"], steps=own["steps"], lr=own["lr"], batch=own["batch"],
                                  seed=bench.seed)
        added += tree.size(repair)
        for split in SPLITS:
            x, labels = about.splits[task][split]
            accuracy[split][task] = repaired_accuracy(about, repair, theta, task, x, labels, bench.usual.batch)
    kind = "test" if todo.adapt_on == "test" else "unlabelled"
    about_it = columns(todo.usual, data=kind, added=added, seen=f"unlabelled {todo.adapt_on} inputs, the task of each "
                       "input, fine-tuned models")
    return _told(bench, f"Surgery on {name}", "adapted", accuracy, tasks, anchors, **about_it)


def repaired_accuracy(about, repair, theta, task: str, inputs, labels, batch: int) -> float:
    """The share of right answers from repaired features."""
    z = surgery.repaired(repair, jnp.asarray(evaluation.features(about.encode, theta, inputs, batch=batch)))
    return float(np.mean(np.argmax(np.asarray(z @ about.heads[task]), -1) == np.asarray(labels)))
