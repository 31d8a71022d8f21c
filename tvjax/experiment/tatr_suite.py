"""The main table of trust regions: every base merge alone, behind the region of gradients, behind the zero-shot one."""
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from tvjax import evaluation, merging, sharding, tree, vectors
from tvjax.calibration import exemplars, grams
from tvjax.experiment import merges, planning, rows
from tvjax.experiment.columns import columns
from tvjax.experiment.study import SPLITS, Bench

BATCH = 32  # inputs of one Gram matrix's pass


class Regions(NamedTuple):
    """Where exemplar gradients of these tasks are kept: they depend on the pretrained model alone."""

    bench: Bench
    folder: pathlib.Path
    tasks: tuple[str, ...]

    def gradients(self, *, loss: str, reduce: str, count: int, draw: int = 0) -> Any:
        """A tree (tasks, …), computed once for all seeds."""
        about, todo = self.bench.about, self.bench.todo
        key = evaluation.content_key(about.base, [about.keys[task][todo.split] for task in self.tasks], loss, reduce,
                                     count, draw)
        path = self.folder / f"{loss}-{reduce}-{count}-draw{draw}-{len(self.tasks)}-{key[:12]}.safetensors"
        if sharding.decided(path.exists):
            return exemplars.load_stack(path, tasks=self.tasks)
        begun = time.perf_counter()
        made = exemplars.exemplar_gradients(about.predict, about.theta0, self._drawn(loss, count, draw), loss=loss,
                                            reduce=reduce)
        self.bench.say(f"gradients of {len(self.tasks)} tasks × {count} exemplars ({loss}, {reduce}, draw {draw}): "
                       f"{time.perf_counter() - begun:.1f} s")
        sharding.once(lambda: exemplars.save_stack(made, path, tasks=self.tasks, base=about.base, loss=loss,
                                                   reduce=reduce, count=str(count), draw=str(draw)))
        return made

    def _drawn(self, loss, count, draw):
        about, split = self.bench.about, self.bench.todo.split
        one = lambda task: exemplars.draw(*about.splits[task][split], count=count, task=task, seed=draw)
        drawn = {task: one(task) for task in self.tasks}
        return {task: exemplars.Exemplars(about.heads[task], inputs, labels if loss == "cross_entropy" else None)
                for task, (inputs, labels) in drawn.items()}

    def usual(self) -> Any:
        """The gradients of the main table."""
        todo = self.bench.todo
        return self.gradients(loss=todo.loss, reduce=todo.reduce, count=todo.exemplars)

    def data(self, loss: str | None = None, count: int | None = None) -> dict:
        """The columns of a region of gradients."""
        todo = self.bench.todo
        loss, count = loss or todo.loss, count or todo.exemplars
        kind = "labelled" if loss == "cross_entropy" else "unlabelled"
        return columns(todo.usual, data=kind, seen=f"{count} {kind} {todo.split} inputs a task")


def merge(operator: merging.Operator, taus, given: dict | None = None) -> Callable[[], Any]:
    """How to make a merged vector, when `judge` asks for it."""
    return lambda: operator(list(taus.values()), tasks=tuple(taus), **(given or {}))


def judge(bench: Bench, label: str, section: str, make: Callable[[], Any], tasks, anchors, *, scales=(), scale=None,
          **more) -> tuple[list[dict], float]:
    """(rows of one merge, its α): α is the first best of `scales` on validation data, or `scale` where it is given."""
    begun = time.perf_counter()
    tau = make()
    seconds = time.perf_counter() - begun
    if scale is None:
        grid = planning.Merge(label, "", {}, tuple(scales))
        scale, _ = merges.choose_scale(bench.about, bench.usual, grid, tasks, tau, anchors["fine-tuned"],
                                       cache=bench.cache)
    theta = evaluation.moved(bench.about.theta0, tau, scale)
    accuracy = {split: bench.measure(theta, tasks, split) for split in SPLITS}
    test, whole = accuracy["test"], anchors["fine-tuned"]["test"]
    bench.say(f"{label}, {len(tasks)} tasks, seed {bench.seed}: test {100 * evaluation.absolute(test):.1f} % "
              f"({100 * evaluation.normalised(test, whole):.1f} % normalised) at α = {scale:g}")
    return rows.accuracies(bench.common(tasks), label, accuracy, anchors["fine-tuned"], section=section, scale=scale,
                           merging_seconds=seconds, **more), scale


def base_operator(base: planning.Merge) -> merging.Operator:
    """The merge at scale 1."""
    return planning.operator(base)


def main_rows(bench: Bench, regions: Regions, taus, anchors) -> list[dict]:
    """Rows of the anchors and of each base in three forms."""
    todo, usual = bench.todo, bench.usual
    found = [row for name, accuracy in anchors.items()
             for row in rows.accuracies(bench.common(tuple(taus)), name, accuracy, anchors["fine-tuned"],
                                        section="anchor", **columns(usual, data="none"))]
    gradients = regions.usual()
    kept = region_rows(bench, taus, gradients)
    forms = (
        ("{}", merging.identity(), {}, columns(usual, data="none")),
        ("TATR + {}", merging.trust_region(quantile=todo.quantile), {"gradients": gradients}, regions.data()),
        ("zero-shot TATR + {}", merging.trust_region(quantile=todo.quantile, by="vectors"), {},
         columns(usual, data="none")),
    )
    for base in todo.bases:
        for words, region, given, about in forms:
            found += judge(bench, words.format(base.label), "main", merge(region | base_operator(base), taus, given),
                           tuple(taus), anchors, scales=base.scales, base=base.label,
                           form=words.format("").strip(" +"), **about)[0]
    return found + kept


def region_rows(bench: Bench, taus, gradients) -> list[dict]:
    """Rows of the share of entries that each region keeps; says it where the region falls back."""
    found, stack = [], list(taus.values())
    for by, given in (("gradients", {"gradients": gradients}), ("vectors", {})):
        omega = np.concatenate([np.ravel(x) for x in jax.tree.leaves(merging.conflicts(by=by)(stack, **given))])
        bound = np.partition(omega, place := min(int(bench.todo.quantile * omega.size), omega.size - 1))[place]
        kept = float((omega < bound).mean())
        if bound <= omega.min():
            bench.say(f"the trust region by {by} would be empty, since no entry lies below its bound {bound:g}: "
                      "entries at the bound are kept")
            kept = float((omega <= bound).mean())
        shared = {"method": f"region by {by}", "task": rows.AVERAGE, "split": "none", **bench.common(tuple(taus))}
        found += [{"metric": "kept share", "value": kept, **shared},
                  {"metric": "bound", "value": float(bound), **shared},
                  {"metric": "zero share", "value": float((omega == 0).mean()), **shared},
                  *histogram_rows(omega, shared)]
    return found


def histogram_rows(omega, shared) -> list[dict]:
    """Rows of the share of entries in each decade of Ω, from 1e-12 on; what is smaller counts into the first."""
    edges = np.logspace(-12, 0, 25)
    counts, _ = np.histogram(np.clip(omega, edges[0], edges[-1]), edges)
    return [{"metric": "omega histogram", "value": float(n / omega.size), **shared, "low": float(low),
             "high": float(high)} for n, low, high in zip(counts, edges, edges[1:], strict=False)]


# ---------------------------------------------------------------- Fisher and RegMean
def statistics_rows(bench: Bench, taus, anchors) -> list[dict]:
    """Rows of merges that weigh by statistics of a few unlabelled training inputs, with what collecting them took."""
    found = []
    for name, count in bench.todo.statistics.items():
        begun = time.perf_counter()
        make = STATISTICS[name](bench, taus, count)
        seconds = time.perf_counter() - begun
        about = columns(bench.usual, data="unlabelled", seen=f"{count} unlabelled {bench.todo.split} inputs a task")
        found += judge(bench, name, "statistics", make, tuple(taus), anchors, scales=(*bench.todo.few, 1.0, 1.5),
                       collecting_seconds=seconds, **about)[0]
    return found


def _inputs(bench: Bench, taus, count: int) -> dict[str, Any]:
    split = bench.todo.split
    return {task: exemplars.draw(*bench.about.splits[task][split], count=count, task=task)[0] for task in taus}


def _batches(inputs) -> list:
    have = len(jax.tree.leaves(inputs)[0])
    return [jax.tree.map(lambda x, i=i: x[i : i + BATCH], inputs) for i in range(0, have, BATCH)]


def _thetas(bench: Bench, taus) -> dict[str, Any]:
    return {task: vectors.add(bench.about.theta0, tau) for task, tau in taus.items()}


def _fisher(bench: Bench, taus, count: int):
    some = {task: exemplars.Exemplars(bench.about.heads[task], inputs)
            for task, inputs in _inputs(bench, taus, count).items()}
    data = exemplars.fisher_diagonals(bench.about.predict, _thetas(bench, taus), some)
    return merge(merging.fisher(), taus, {"fisher": data})


def _regmean(bench: Bench, taus, count: int):
    batches = {task: _batches(inputs) for task, inputs in _inputs(bench, taus, count).items()}
    gram = grams.stacked(bench.about.encode, _thetas(bench, taus), batches)
    mine = {name: x for name, x in gram.items() if name in tree.flatten(bench.about.theta0)}
    if flat := grams.singular(mine):
        bench.say(f"regmean: {len(flat)} of {len(mine)} Gram matrices are singular, such as that of {flat[0]}; "
                  "directions without inputs are averaged, a ridge of 1e-06 of the mean eigenvalue holds elsewhere")
    return merge(merging.regmean(where=merging.named("|".join(f"^{name}$" for name in mine))), taus, {"gram": mine})


def _regmean_plus_plus(bench: Bench, taus, count: int):
    batches = {task: _batches(inputs) for task, inputs in _inputs(bench, taus, count).items()}
    made = grams.regmean_plus_plus(bench.about.encode, bench.about.theta0, taus, batches)
    return lambda: made


STATISTICS = {"fisher": _fisher, "regmean": _regmean, "regmean++": _regmean_plus_plus}
