"""A benchmark of real tasks: addition, negation, and the controls without which neither can be read.

For every seed: task vectors, the two anchors, every merge; a linear probe of the pretrained features on the same
training examples (a cheap rival of merging, arXiv:2511.14569); and negation, θ0 − α·τ_t for each task, with the α that
ruins the task most while the control keeps `threshold` of its accuracy on validation data (arXiv:2212.04089).
"""
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from tvjax import evaluation, sharding
from tvjax.experiment import merges, negation, planning, rows, study
from tvjax.experiment.planning import Plan

FIELDS = ("negation", "threshold", "probe", "expected")


@dataclasses.dataclass(frozen=True)
class BenchmarkPlan:
    """A checked config of this job.

    negation: the grid of α, () for none. probe: training examples of a task's linear probe, 0 for none. expected:
    {method: published average test accuracy}, shown beside the measured one.
    """

    usual: Plan
    vectors: str
    negation: tuple[float, ...]
    threshold: float
    probe: int
    expected: dict[str, float]


def plan(config: Any) -> BenchmarkPlan:
    """The checked config; ValueError with one sentence for a slip in it."""
    given = dict(planning.plain(config))
    own, vectors = given.pop("benchmark", None), given.pop("vectors", "")
    if given.pop("job", None) != "benchmark" or not isinstance(own, dict):
        raise ValueError('this job needs job="benchmark" and a group of fields called benchmark')
    planning.known(own, FIELDS, "benchmark", complete=True)
    usual = planning.plan(given)
    if own["negation"] and not usual.control:
        raise ValueError("negation needs a control task: name one in control, or leave benchmark.negation empty")
    if not 0 < own["threshold"] <= 1:
        raise ValueError("benchmark.threshold is the share of the control's accuracy to keep, above 0 and at most 1; "
                         f"got {own['threshold']!r}")
    if not isinstance(own["probe"], int) or own["probe"] < 0:
        raise ValueError(f"benchmark.probe is a number of examples, or 0 for none; got {own['probe']!r}")
    grid = planning._scales(own["negation"]) if own["negation"] else ()
    return BenchmarkPlan(usual, study.check_vectors(vectors), grid, own["threshold"], own["probe"],
                         dict(own["expected"]))


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole job in `folder` and returns its rows, which are then in `folder`/results.jsonl."""
    todo, folder = plan(config), pathlib.Path(folder)

    def seed_rows(about, seed, timed):
        bench = study.Bench(about, todo.usual, folder / "cache" / f"seed{seed}.jsonl", seed, timed, todo)
        return _seed(bench, folder, progress)
    return study.run(config, todo.usual, folder, seed_rows, say=say, shared_rows=lambda about, _: _data(about, todo))


def _data(about, todo: BenchmarkPlan) -> list[dict]:
    """Rows of how many examples each task has in each split, with the source that was taken."""
    shared = rows.common(todo.usual, todo.usual.tasks, todo.usual.seeds[0])
    return [{"metric": "examples", "value": len(part[1]), "method": "data", "task": task, "split": split,
             "source": about.sources.get(task, ""), **shared}
            for task, splits in about.splits.items() for split, part in splits.items()]


def _seed(bench: study.Bench, folder, progress) -> list[dict]:
    taus = study.task_vectors(bench, folder, theirs=bench.todo.vectors, progress=progress)
    anchors, found = study.anchors(bench, taus), []
    for count in bench.usual.counts:
        found += _merges(bench, bench.usual.tasks[:count], taus, anchors, folder)
    found += _probes(bench) if bench.todo.probe else []
    found += _negations(bench, taus) if bench.todo.negation else []
    return found


def _merges(bench: study.Bench, tasks, taus, anchors, folder) -> list[dict]:
    """Rows of the anchors and of every merge of these tasks."""
    shared = bench.common(tasks)
    own = {name: {split: {task: by[task] for task in tasks} for split, by in splits.items()}
           for name, splits in anchors.items()}
    found = [row for name, accuracy in own.items()
             for row in rows.accuracies(shared, name, accuracy, own["fine-tuned"], data="none")]
    for merge in bench.usual.merges:
        judged = merges.judge(bench.about, bench.usual, merge, tasks, [taus[task] for task in tasks],
                              own["fine-tuned"], cache=bench.cache)
        found += rows.merged(shared, merge, judged, own["fine-tuned"], split=bench.usual.select_on,
                             data=merges.data_used(merge, bench.usual))
        if bench.usual.save_models and bench.seed == bench.usual.seeds[0]:
            theta = evaluation.moved(bench.about.theta0, judged.tau, judged.scale)
            place = folder / "merged" / f"{len(tasks)}-tasks" / merge.label
            sharding.once(lambda theta=theta, place=place: bench.about.save(theta, place))
        test = judged.accuracy["test"]
        bench.say(f"{merge.label}, {len(tasks)} tasks, seed {bench.seed}: test {100 * evaluation.absolute(test):.1f} % "
                  f"({100 * evaluation.normalised(test, own['fine-tuned']['test']):.1f} % normalised) "
                  f"at α = {judged.scale:g}")
    return found


def _probes(bench: study.Bench) -> list[dict]:
    """Rows of linear probes; the same for all seeds, so the first one measures and the cache answers the others."""
    about, tasks = bench.about, bench.usual.tasks
    cache = bench.cache.with_name("probes.jsonl")
    one = lambda task: evaluation.cached(
        cache, lambda: _probe(about, task, bench.todo.probe, bench.usual.batch), "probe", bench.todo.probe,
        [about.keys[task][split] for split in ("train", "val", "test")])
    accuracy = {task: one(task) for task in tasks}
    bench.say(f"linear probe: test {100 * evaluation.absolute(accuracy):.1f} %")
    found = {**accuracy, rows.AVERAGE: evaluation.absolute(accuracy)}
    return [{"metric": "accuracy", "value": value, "method": "linear probe", "task": task, "split": "test",
             **bench.common(tasks), "data": "training labels"} for task, value in found.items()]


def _probe(about, task: str, most: int, batch: int) -> float:
    cut = {split: (jax.tree.map(lambda x: x[:most], part[0]), part[1][:most]) if split == "train" else tuple(part)
           for split, part in about.splits[task].items()}
    features = {split: (evaluation.features(about.encode, about.theta0, inputs, batch=batch), labels)
                for split, (inputs, labels) in cut.items()}
    return evaluation.linear_probe(features["train"], features["val"], features["test"],
                                   classes=about.heads[task].shape[1])


def _negations(bench: study.Bench, taus) -> list[dict]:
    """Rows of negation, each task's vector in turn, beside those of the pretrained model."""
    found = {}
    for task, tau in taus.items():
        one = found[task] = negation.negate(bench, tau, task, scales=bench.todo.negation,
                                            threshold=bench.todo.threshold)
        bench.say(f"negation of {task}, seed {bench.seed}: {100 * one.target['test']:.1f} % on it, "
                  f"{100 * one.control['test']:.1f} % on {bench.about.control} at α = {one.scale:g}")
    tasks = tuple(taus)
    return [*negation.zero_shot_rows(bench, tasks), *negation.negation_rows(bench.common(tasks), "negated", found)]
