"""Task addition: α searched, one learned number a vector, one a tensor; interference, the control, shares of the data.

What selects is the validation split, what is reported the test split. Interference is pair-wise, ξ_ij = share of D_i
whose prediction changes when Λ_j τ_j joins Λ_i τ_i (arXiv:2407.02880, appendix C.2).
"""
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from tvjax import evaluation, learning, sharding, training
from tvjax.experiment import rows, study, way_tuning
from tvjax.experiment import ways as experiment_ways
from tvjax.experiment.atlas_bench import named, of_pool, once, plain, row, saw, told
from tvjax.experiment.partial_plan import WayPlan
from tvjax.experiment.study import SPLITS, Bench
from tvjax.learning import Scheme, arithmetic, heads, statistics, ways

PART = "addition"


def addition(bench: Bench, taus, anchors, folder) -> list[dict]:
    """Rows of task addition on all tasks."""
    own, tasks = bench.todo.of[PART], list(taus)
    found = [*_anchors(bench, tasks, anchors)]
    for geometry in own["geometry"]:
        mine, whole = taus, anchors
        if geometry == "linearised":
            mine = linear_vectors(bench, folder)
            whole = {**anchors, "fine-tuned": _linear_anchor(bench, mine)}
            found += judged(bench, "fine-tuned, linearised", whole["fine-tuned"], whole)
        held = learning.pool(list(mine.values()), bench.about.theta0, store=bench.todo.store)
        found += _searched(bench, mine, whole, geometry)
        for scheme in own["schemes"]:
            found += _learned(bench, tasks, held, scheme, whole, folder, geometry=geometry)
    held = learning.pool(list(taus.values()), bench.about.theta0, store=bench.todo.store)
    for p in own["penalties"]:
        found += _learned(bench, tasks, held, Scheme(), anchors, folder, p=int(p))
    return found + _fractions(bench, tasks, held, anchors, folder)


def _anchors(bench, tasks, anchors):
    for method, accuracy in anchors.items():
        yield from judged(bench, method, accuracy, anchors)
        if bench.about.control and method == "zero-shot":
            yield from _control(bench, method, bench.about.theta0, bench.about.predict)


def linear_vectors(bench: Bench, folder) -> dict[str, Any]:
    """{task: τ} of fine-tuning in the tangent space; those of a run of the job "tangent" are taken over."""
    plan = WayPlan("linearised", "tangent", "", None, 42, "none", bench.todo.of[PART]["linear"])
    how, found = experiment_ways.build(plan, bench.about, bench.seed), {}
    for task in bench.usual.tasks:
        mine = way_tuning.place(folder, how, task, bench.seed)
        study.take_over(mine, way_tuning.place(bench.todo.vectors or folder, how, task, bench.seed))
        found[task] = way_tuning.tune(bench, how, task, folder, progress=False).tau
    return found


def _linear_anchor(bench: Bench, taus) -> dict[str, dict[str, float]]:
    """Accuracies of the linearised models fine-tuned one by one, which normalise the linearised rows."""
    predict, place = _geometry(bench.about, "linearised")
    one = lambda task, split: _accuracy(bench, predict, place(bench.about.theta0, taus[task]), [task])[split][task]
    return {split: {task: one(task, split) for task in taus} for split in SPLITS}


def judged(bench: Bench, method: str, accuracy, anchors, **more) -> list[dict]:
    """Rows of one method's accuracies on the tasks, absolute and normalised; says the average."""
    finetuned = anchors["fine-tuned"]
    test = accuracy["test"]
    bench.say(f"{method}, seed {bench.seed}: test {100 * evaluation.absolute(test):.1f} % "
              f"({100 * evaluation.normalised(test, finetuned['test']):.1f} % normalised)")
    shared = bench.common(bench.usual.tasks)
    return rows.accuracies(shared, method, accuracy, finetuned, part=PART, **saw(PART, method), **more)


def label(name: str, geometry: str) -> str:
    return name if geometry == "standard" else f"{name}, linearised"


def _searched(bench: Bench, taus, anchors, geometry) -> list[dict]:
    """α of the sum, by the first best average normalised validation accuracy; what that search took."""
    own, about, tasks = bench.todo.of[PART], bench.about, list(taus)
    predict, place = _geometry(about, geometry)
    total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), [dict(tau) for tau in taus.values()])
    begun = time.perf_counter()
    trace = evaluation.cached(
        bench.cache, lambda: {"sweep": evaluation.sweep(predict, about.theta0, total, own["grid"],
                                                        about.judged(tasks, "val"), batch=bench.usual.batch,
                                                        place=place), "seconds": time.perf_counter() - begun},
        "atlas sweep", geometry, total, list(own["grid"]), [about.keys[task]["val"] for task in tasks])
    at = dict(zip(own["grid"], trace["sweep"], strict=True))
    best = evaluation.search(lambda a: evaluation.normalised(at[a], anchors["fine-tuned"]["val"]), own["grid"])
    point = evaluation.moved(about.theta0, total, best.best, place=place)
    method = label("searched α", geometry)
    found = judged(bench, method, _accuracy(bench, predict, point, tasks), anchors, scale=best.best, numbers=1)
    found.append(row(bench, PART, method, rows.AVERAGE, trace["seconds"], metric="seconds", split="none"))
    found += _control(bench, method, point, predict)
    scaled = [jax.tree.map(lambda x: best.best * x, dict(tau)) for tau in taus.values()]
    return found + _interference(bench, method, scaled, tasks, predict, place)


def _learned(bench: Bench, tasks, held, scheme: Scheme, anchors, folder, *, geometry="standard", p=0) -> list[dict]:
    about, way = bench.about, of_pool(bench, held, scheme, geometry=geometry)
    made = _course(bench, tasks, held, scheme, anchors, folder, way=way, geometry=geometry, p=p)
    point = ways.model(way, made["params"])
    method = label(named(scheme) + (f", L{p}" if p else ""), geometry)
    found = judged(bench, method, _accuracy(bench, way.predict, point, tasks), anchors, epoch=made["epoch"],
                   numbers=learning.count(way.start))
    base = dict(part=PART, **saw(PART, method), **bench.common(bench.usual.tasks))
    found += [{"metric": "trace", "value": value, "method": method, "task": rows.AVERAGE, "split": "val",
               "epoch": epoch, **base} for epoch, value in enumerate(made["trace"])]
    found.append(row(bench, PART, method, rows.AVERAGE, made["seconds"], metric="seconds", split="none"))
    found += _control(bench, method, point, way.predict)
    if not p:
        scaled = [learning.delta(learning.take(held, [i]), _one(made["params"], i), scheme) for i in range(len(tasks))]
        found += _interference(bench, method, scaled, tasks, *_geometry(about, geometry))
    if bench.usual.save_models and geometry == "standard" and bench.seed == bench.usual.seeds[0]:
        theta = sharding.host(point)
        sharding.once(lambda: about.save(theta, folder / "merged" / method))
    if scheme.by == "tensor" and scheme.blocks == "all" and geometry == "standard":
        found += _statistics(bench, method, made["params"], tasks)
    return found


def _course(bench: Bench, tasks, held, scheme: Scheme, anchors, folder, *, way, geometry="standard", p=0, share=1.0):
    """What is learned from a share of the validation splits, kept."""
    own, about = bench.todo.of[PART], bench.about
    some = {task: heads.fraction(about.splits[task]["val"], share, seed=bench.seed) for task in tasks}
    return once(folder, "addition", way.start,
                lambda: told(arithmetic.addition(way, {task: about.heads[task] for task in tasks}, some,
                                                 anchors["fine-tuned"]["val"], p=p, course=own["course"],
                                                 batch=bench.usual.batch)),
                held, str(scheme), geometry, p, plain(own["course"]), list(some.values()))


def _one(coefficients, i: int):
    return {name: c[i:i + 1] for name, c in coefficients.items()}


def _geometry(about, geometry: str):
    if geometry == "linearised":
        return evaluation.classify_linearised(about.encode, about.readout), evaluation.paired
    return about.predict, evaluation.shifted


def _accuracy(bench: Bench, predict, point, tasks) -> dict[str, dict[str, float]]:
    one = lambda task, split: evaluation.cached(
        bench.cache, lambda: evaluation.accuracy(predict, point, bench.about.heads[task],
                                                 tuple(bench.about.splits[task][split]), batch=bench.usual.batch),
        "atlas accuracy", point, bench.about.keys[task][split])
    return {split: {task: one(task, split) for task in tasks} for split in SPLITS}


def _control(bench: Bench, method: str, point, predict) -> list[dict]:
    """The accuracy on the control task, which no task vector has trained on."""
    control = bench.about.control
    if not control:
        return []
    value = _accuracy(bench, predict, point, [control])["test"][control]
    return [row(bench, PART, method, control, value, metric="control")]


def _interference(bench: Bench, method: str, scaled, tasks, predict, place) -> list[dict]:
    """Pair-wise ξ on the validation images at the chosen scales, and its mean off the diagonal."""
    data = [(bench.about.heads[task], tuple(bench.about.splits[task]["val"])[0]) for task in tasks]
    matrix = evaluation.cached(
        bench.cache, lambda: evaluation.disentanglement_pairs(predict, bench.about.theta0, scaled, data,
                                                              batch=bench.usual.batch, place=place).tolist(),
        "atlas xi", scaled, place.__name__, [bench.about.keys[task]["val"] for task in tasks])
    found = [row(bench, PART, method, tasks[i], matrix[i][j], metric="xi", split="val", other=tasks[j])
             for i in range(len(tasks)) for j in range(len(tasks)) if i != j]
    mean = evaluation.off_diagonal_mean(matrix)
    bench.say(f"{method}, seed {bench.seed}: pair-wise ξ {100 * mean:.1f} %")
    return [*found, row(bench, PART, method, rows.AVERAGE, mean, metric="xi", split="val")]


def _statistics(bench: Bench, method: str, coefficients, tasks) -> list[dict]:
    """Five numbers of the coefficients by kind of tensor, depth and task vector."""
    found = []
    for by in ("kind", "depth", "vector"):
        for group, five in statistics.summaries(coefficients, by=by).items():
            name = tasks[int(group)] if by == "vector" else group
            found.append(row(bench, PART, method, rows.AVERAGE, five.median, metric="coefficients", split="none", by=by,
                             group=name, **{key: value for key, value in five._asdict().items() if key != "median"}))
    return found


# ---------------------------------------------------------------- less data, and fine-tuning on it instead
def _fractions(bench: Bench, tasks, held, anchors, folder) -> list[dict]:
    """aTLAS and multi-task fine-tuning from θ0 on shares of the validation data."""
    own, about, found = bench.todo.of[PART], bench.about, []
    for share in own["fractions"]:
        some = {task: heads.fraction(about.splits[task]["val"], share, seed=bench.seed) for task in tasks}
        way = of_pool(bench, held, Scheme())
        made = _course(bench, tasks, held, Scheme(), anchors, folder, way=way, share=share)
        found += _share_rows(bench, tasks, "aTLAS", share, ways.model(way, made["params"]))
        tuned = once(folder, "multi-task", about.theta0, lambda some=some: multi_task(bench, some),
                     share, bench.seed, own["tuning"], [about.keys[task]["val"] for task in tasks])
        found += _share_rows(bench, tasks, "multi-task fine-tuning", share, tuned["params"])
    return found


def multi_task(bench: Bench, some) -> dict[str, Any]:
    """θ0 fine-tuned on all tasks at once."""
    about, own = bench.about, bench.todo.of[PART]
    recipe = training.Recipe(**own["tuning"], seed=bench.seed)
    joined = heads.join([about.heads[task] for task in some])
    each = max(1, recipe.batch // len(some))
    feed = heads.together(list(some.values()), joined.offsets, batches=[each] * len(some), seed=bench.seed)
    way = ways.whole(about.predict, about.theta0)
    fitted = training.fit(heads.weighted(way.point, way.predict), way.start, feed, recipe, progress=False,
                          frozen=(way.frozen, (joined.head, joined.owner, jnp.full(len(some), 1 / len(some)))))
    return {"params": jax.device_get(ways.model(way, fitted.params)), "seconds": fitted.seconds}


def _share_rows(bench: Bench, tasks, method: str, share: float, point) -> list[dict]:
    test = _accuracy(bench, bench.about.predict, point, tasks)["test"]
    found = [row(bench, "fractions", method, rows.AVERAGE, evaluation.absolute(test), share=share)]
    if bench.about.control:
        control = bench.about.control
        value = _accuracy(bench, bench.about.predict, point, [control])["test"][control]
        found.append(row(bench, "fractions", method, control, value, metric="control", share=share))
    bench.say(f"{method}, {100 * share:g} % of the data, seed {bench.seed}: {100 * found[0]['value']:.1f} %")
    return found

