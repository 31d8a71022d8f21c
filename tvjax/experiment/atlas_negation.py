"""Task negation: forget one task, keep the control at 95 % of what it was; α searched against learned coefficients.

Chosen on the validation splits of both, reported on their test splits (arXiv:2212.04089, arXiv:2407.02880 §4.1).
"""
import statistics

import jax

from tvjax import evaluation, learning
from tvjax.experiment import rows
from tvjax.experiment.atlas_bench import named, once, plain, row, told, way
from tvjax.experiment.study import Bench
from tvjax.learning import arithmetic, ways

PART = "negation"


def negation(bench: Bench, taus, anchors, folder) -> list[dict]:
    """Rows of every method: accuracy on each target and on the control, and on average over the targets."""
    about, methods = bench.about, {}
    taus = {task: taus[task] for task in bench.todo.of[PART]["targets"]}
    kept = str(about.control)
    control = {split: bench.measure(about.theta0, [kept], split)[kept] for split in ("val", "test")}
    methods["zero-shot"] = {task: (anchors["zero-shot"]["test"][task], control["test"], {}) for task in taus}
    methods["searched α"] = {task: _searched(bench, task, tau, control["val"]) for task, tau in taus.items()}
    for scheme in bench.todo.of[PART]["schemes"]:
        methods[named(scheme)] = {task: _learned(bench, task, tau, scheme, folder) for task, tau in taus.items()}
    return [one for name, found in methods.items() for one in _rows(bench, name, found)]


def _rows(bench: Bench, method: str, found) -> list[dict]:
    made = []
    for metric, i in (("target", 0), ("control", 1)):
        made += [row(bench, PART, method, task, values[i], metric=metric, **values[2])
                 for task, values in found.items()]
        mean = statistics.fmean(values[i] for values in found.values())
        made.append(row(bench, PART, method, rows.AVERAGE, mean, metric=metric))
    bench.say(f"negation, {method}, seed {bench.seed}: target {100 * made[-1 - len(made) // 2]['value']:.1f} %, "
              f"control {100 * made[-1]['value']:.1f} %")
    return made


def _searched(bench: Bench, task: str, tau, at_zero: float):
    """(target, control, {"scale"}) on test, at the α that validation chooses."""
    about, grid, kept = bench.about, bench.todo.of[PART]["grid"], str(bench.about.control)
    names = (task, kept)
    trace = evaluation.cached(
        bench.cache, lambda: evaluation.sweep(about.predict, about.theta0, tau, [-a for a in grid],
                                              about.judged(names, "val"), batch=bench.usual.batch),
        "negation sweep", tau, list(grid), [about.keys[name]["val"] for name in names])
    at = dict(zip(grid, trace, strict=True))
    best = evaluation.search_negation(lambda a: at[a][task], lambda a: at[a][kept], grid,
                                      control_at_zero=at_zero)
    point = evaluation.moved(about.theta0, tau, -best.best)
    return (*_test(bench, task, point), {"scale": best.best})


def _learned(bench: Bench, task: str, tau, scheme, folder):
    """(target, control, {"epoch"}) on test, at the epoch that validation chooses."""
    about = bench.about
    course = arithmetic.negation_course(task, bench.todo.of[PART]["course"])
    one, names = way(bench, [tau], scheme), (task, str(about.control))
    target, kept = (about.splits[name]["val"] for name in names)
    made = once(folder, "negation", one.start,
                lambda: told(arithmetic.negation(one, (about.heads[task], about.heads[names[1]]), (target, kept),
                                                 course=course, batch=bench.usual.batch)),
                tau, str(scheme), plain(course), bench.todo.store, [about.keys[name]["val"] for name in names])
    return (*_test(bench, task, jax.device_get(ways.model(one, made["params"]))),
            {"epoch": made["epoch"], "numbers": learning.count(one.start), "seconds": made["seconds"]})


def _test(bench: Bench, task: str, point) -> tuple[float, float]:
    kept = str(bench.about.control)
    found = bench.measure(point, [task, kept], "test")
    return found[task], found[kept]
