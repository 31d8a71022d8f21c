"""Ablations of the trust region on the sum of task vectors, and what it does to conflicts between tasks.

All choose α on validation data, from a short grid; studies over exemplars take that of the main region, as the paper's.
"""
import jax
import numpy as np

from tvjax import evaluation, merging
from tvjax.experiment import rows
from tvjax.experiment.columns import columns
from tvjax.experiment.study import Bench
from tvjax.experiment.tatr_suite import Regions, base_operator, judge, merge


def all_rows(bench: Bench, regions: Regions, taus, anchors) -> list[dict]:
    """Rows of all ablations of a plan."""
    return [*forms(bench, regions, taus, anchors), *over_quantiles(bench, regions, taus, anchors),
            *over_exemplars(bench, regions, taus, anchors), *conflicts(bench, regions, taus, anchors)]


def forms(bench: Bench, regions: Regions, taus, anchors) -> list[dict]:
    """Other gradients, a region for each pair, removal by magnitude, scaling by sign."""
    todo, found = bench.todo, []
    region = merging.trust_region(quantile=todo.quantile)
    gradients = regions.usual()
    tries: list = [("no region", merging.identity(), None, None)]
    tries += [(f"{loss}, {reduce}", region, regions.gradients(loss=loss, reduce=reduce, count=todo.exemplars), loss)
              for loss, reduce in ((todo.loss, todo.reduce), *todo.sources)]
    tries += [(f"pairs, q = {q:g}", merging.trust_pairs(quantile=q), gradients, todo.loss) for q in todo.pairs]
    tries += [(f"magnitude, {share:g} removed", merging.tails(gamma=share, scope="global"), None, None)
              for share in todo.removals]
    if todo.multipliers:
        signed = regions.gradients(loss=todo.loss, reduce="mean", count=todo.exemplars)
        tries += [(f"sign × {by:g}", merging.scale_descent(by=by), signed, todo.loss) for by in todo.multipliers]
    for label, step, given, loss in tries:
        about = regions.data(loss) if loss else columns(todo.usual, data="none")
        make = merge(step | merging.total(), taus, {"gradients": given} if loss else {})
        found += judge(bench, label, "forms", make, tuple(taus), anchors, scales=todo.few, **about)[0]
    return found


def over_quantiles(bench: Bench, regions: Regions, taus, anchors) -> list[dict]:
    """Rows of the sum over quantiles, by gradients and by task vectors."""
    found = []
    for quantile in bench.todo.quantiles:
        for by, given, about in (("gradients", {"gradients": regions.usual()}, regions.data()),
                                 ("vectors", {}, columns(bench.usual, data="none"))):
            make = merge(merging.trust_region(quantile=quantile, by=by) | merging.total(), taus, given)
            found += judge(bench, f"region by {by}", "quantiles", make, tuple(taus), anchors, scales=bench.todo.few,
                           quantile=quantile, **about)[0]
    return found


def over_exemplars(bench: Bench, regions: Regions, taus, anchors) -> list[dict]:
    """Rows of the sum over numbers of exemplars and draws of them, at the α of the main region."""
    todo, found = bench.todo, []
    operator = merging.trust_region(quantile=todo.quantile) | merging.total()
    if todo.counts and todo.draws:
        usual = merge(operator, taus, {"gradients": regions.usual()})
        _, scale = judge(bench, "TATR", "", usual, tuple(taus), anchors, scales=todo.few)
        for count in todo.counts:
            for draw in range(todo.draws):
                given = regions.gradients(loss=todo.loss, reduce=todo.reduce, count=count, draw=draw)
                found += judge(bench, "TATR", "exemplars", merge(operator, taus, {"gradients": given}), tuple(taus),
                               anchors, scale=scale, count=count, draw=draw, **regions.data(count=count))[0]
    return found


def conflicts(bench: Bench, regions: Regions, taus, anchors) -> list[dict]:
    """Rows of KC[i, j] = accuracy on j of the merge of all − of the merge without task i, on the test split, at one α.

    A negative entry says that task i disturbs task j. The trust region of the others is their own.
    """
    todo, tasks, found = bench.todo, tuple(taus), []
    base = todo.bases[0]
    for form in todo.conflicts:
        region = merging.identity() if form == "base" else merging.trust_region(quantile=todo.quantile)
        operator = region | base_operator(base)
        label = base.label if form == "base" else f"TATR + {base.label}"
        given = {} if form == "base" else {"gradients": regions.usual()}
        whole, scale = judge(bench, label, "", merge(operator, taus, given), tasks, anchors, scales=base.scales)
        full = {row["task"]: row["value"] for row in whole if row["metric"] == "accuracy" and row["split"] == "test"}
        for i, out in enumerate(tasks):
            rest = [task for task in tasks if task != out]
            data = {name: _without(stack, i) for name, stack in given.items()}
            tau = operator([taus[task] for task in rest], tasks=rest, **data)
            less = bench.measure(evaluation.moved(bench.about.theta0, tau, scale), rest, "test")
            found += [{"metric": "conflict", "value": full[task] - less[task], "method": label, "task": task,
                       "other": out, "split": "test", "scale": scale, **bench.common(tasks)} for task in rest]
        mine = [row["value"] for row in found if row["method"] == label]
        found.append({"metric": "mean conflict", "value": sum(mine) / len(mine), "method": label,
                      "task": rows.AVERAGE, "split": "test", **bench.common(tasks)})
        bench.say(f"conflicts under {label}, seed {bench.seed}: mean change {100 * sum(mine) / len(mine):.2f} points")
    return found


def _without(stack, i: int):
    return jax.tree.map(lambda x: np.delete(x, i, 0), stack)
