"""What the geometry of task vectors tells, way by way: cosines, ξ in the plane of two tasks, losses there, linearity.

ξ: arXiv:2305.12827. Grids are [−span, span]²; the box [0, 1]² is where α is usually searched.
"""
import itertools
from typing import Any

import jax
import numpy as np

from tvjax import evaluation, tree, vectors
from tvjax.evaluation.mixtures import Family, mixture_accuracy, mixtures, plane
from tvjax.experiment import rows, ways
from tvjax.experiment.partial_suite import Judged, judge, scores


def study_rows(one: Judged) -> list[dict]:
    """All studies of a way that the plan asks for."""
    found = cosine_rows(one)
    if one.todo.plane:
        found += pair_rows(one)
        if one.bench.seed == one.bench.usual.seeds[0]:
            found += plane_rows(one)
    if one.todo.scatter and one.way.plan.kind == "standard":
        found += linear_rows(one)
    return found + (negation_rows(one) if one.todo.negation else [])


def cosine_rows(one: Judged) -> list[dict]:
    """Cosines of all pairs, and the means of them and of their magnitudes."""
    matrix = np.asarray(vectors.cosines(tree.unstack(one.stack)))
    off = ~np.eye(len(matrix), dtype=bool)
    means = {"mean cosine": matrix[off].mean(), "mean |cosine|": np.abs(matrix[off]).mean()}
    found = [_row(one, name, float(value), part="cosines") for name, value in means.items()]
    return found + [_row(one, "cosine", float(matrix[i, j]), task=one.tasks[i], other=one.tasks[j], part="cosines")
                    for i, j in itertools.combinations(range(len(matrix)), 2)]


def pair_rows(one: Judged) -> list[dict]:
    """Pair-wise ξ, E_{x∼D_i}[ŷ(λτ_i) ≠ ŷ(λτ_i + λτ_j)] on test inputs, at the λ that task arithmetic takes for all."""
    tasks = len(one.tasks)
    ask = judge(one, one.tasks)
    grid = np.array([np.full(tasks, scale) for scale in one.todo.scales if scale > 0])
    scale = float(grid[int(np.argmax(ask(grid)[0]))][0])
    eye, error = scale * np.eye(tasks), np.zeros((tasks, tasks))
    for i, task in enumerate(one.tasks):
        head, data = _test(one, task)
        key = ("pairs", one.name, scale, one.todo.plane["examples"], one.bench.about.keys[task]["test"])
        error[i] = evaluation.cached(one.bench.cache, lambda i=i, head=head, data=data: _disturbed(
            one, np.concatenate([eye[i][None], eye[i] + np.delete(eye, i, 0)]), i, head, data), *key)
    found = [_row(one, "xi pair", float(error[i, j]), task=one.tasks[i], other=one.tasks[j], scale=scale, part="pairs")
             for i, j in itertools.permutations(range(tasks), 2)]
    return [*found, _row(one, "mean xi pair", evaluation.off_diagonal_mean(error), scale=scale, part="pairs")]


def _disturbed(one: Judged, coefficients, i: int, head, data) -> list[float]:
    made = mixtures(one.way.family, one.stack, coefficients, head, data, batch=one.bench.usual.batch).classes
    shares = [evaluation.disagreement(made[0], other) for other in made[1:]]
    return [*shares[:i], 0.0, *shares[i:]]


def plane_rows(one: Judged) -> list[dict]:
    """ξ and the losses of both tasks in the plane of the first pairs of task vectors."""
    asked, found = one.todo.plane, []
    grid = np.linspace(-asked["span"], asked["span"], asked["points"])
    every = tree.unstack(one.stack)
    for i, j in list(itertools.combinations(range(len(one.tasks)), 2))[:asked["pairs"]]:
        a, b = one.tasks[i], one.tasks[j]
        measure = lambda i=i, j=j, a=a, b=b: _plane(one, every[i], every[j], a, b, grid)
        made = evaluation.cached(one.bench.cache, measure, "plane", one.name, a, b, dict(asked),
                                 [one.bench.about.keys[task]["test"] for task in (a, b)])
        for name, matrix in (("xi", made["xi"]), ("loss first", made["losses"][0]), ("loss second", made["losses"][1])):
            found += [_row(one, name, float(matrix[m][n]), task=a, other=b, alpha1=float(x), alpha2=float(y),
                           part="plane") for m, x in enumerate(grid) for n, y in enumerate(grid)]
        found.append(_row(one, "passes", made["passes"], task=a, other=b, part="plane", plain=made["plain"]))
        one.bench.say(f"{one.way.name}: ξ and losses of {a} and {b} at {len(grid)}² points in {made['passes']} passes "
                      f"(the plain way takes {made['plain']})")
    return found


def _plane(one: Judged, tau1, tau2, a: str, b: str, grid) -> dict[str, Any]:
    made = plane(one.way.family, tau1, tau2, _test(one, a), _test(one, b), grid, batch=one.bench.usual.batch)
    return {"xi": made.xi.tolist(), "losses": [np.minimum(x, 1e9).tolist() for x in made.losses], "passes": made.passes,
            "plain": 2 * (len(grid) ** 2 + len(grid))}


def linear_rows(one: Judged) -> list[dict]:
    """Accuracy of each tuned model beside that of its linearisation at θ0, and the advantage of not being linear."""
    linear = Family(one.way.family.base, evaluation.paired, ways.linearly(one.bench.about.encode),
                    readout=one.bench.about.readout)
    found = []
    for i, task in enumerate(one.tasks):
        head, data = one.bench.about.heads[task], tuple(one.bench.about.splits[task]["test"])
        row = np.eye(len(one.tasks), dtype=np.float32)[i:i + 1]
        value = evaluation.cached(one.bench.cache, lambda row=row, head=head, data=data: float(mixture_accuracy(
            linear, one.stack, row, head, data, batch=one.bench.usual.batch)[0]), "linear", one.name, i,
            one.bench.about.keys[task]["test"])
        tuned = one.single["test"][task]
        gain = evaluation.nonlinear_advantage(tuned, value, classes=head.shape[1])
        found += [_row(one, "post-hoc linear accuracy", value, task=task, split="test", part="scatter", tuned=tuned),
                  _row(one, "nonlinear advantage", gain, task=task, split="test", part="scatter")]
    return found


def negation_rows(one: Judged) -> list[dict]:
    """−λ·τ_t: the λ with the least accuracy on the target whose control keeps 95 % of zero-shot, on the split that
    selects; both judged on test (arXiv:2212.04089)."""
    control, split = one.bench.about.control, one.bench.usual.select_on
    if control is None:
        return []
    tasks, found = len(one.tasks), []
    zero = scores(one, np.zeros((1, tasks)), [control], split)[0].accuracy[control]
    for i, task in enumerate(one.tasks):
        grid = -np.array([np.eye(tasks)[i] * scale for scale in one.todo.scales])
        at = dict(zip(one.todo.scales, scores(one, grid, [task, control], split), strict=True))
        best = evaluation.search_negation(lambda s, at=at, task=task: at[s].accuracy[task],
                                          lambda s, at=at: at[s].accuracy[control], one.todo.scales,
                                          control_at_zero=zero).best
        made = scores(one, -best * np.eye(tasks)[i:i + 1], [task, control], "test")[0].accuracy
        found += [_row(one, "negated target", made[task], task=task, split="test", scale=best, part="negation"),
                  _row(one, "negated control", made[control], task=task, split="test", scale=best, part="negation")]
    return found


def _test(one: Judged, task: str):
    """(head, (inputs, labels)) of so many test examples as the plan takes for planes."""
    most = one.todo.plane["examples"]
    inputs, labels = one.bench.about.splits[task]["test"]
    return one.bench.about.heads[task], (jax.tree.map(lambda x: x[:most], inputs), labels[:most])


def _row(one: Judged, metric: str, value: int | float, *, task: str = rows.AVERAGE, split: str = "none",
         **more) -> dict:
    return {"metric": metric, "value": value, "method": one.way.name, "task": task, "split": split,
            **one.bench.common(list(one.tasks)), **more}
