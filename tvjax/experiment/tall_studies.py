"""Two studies beside the tables: how accuracy and storage change with the number of tasks, and the control without
interference between weights (arXiv:2405.07813, figure 5 and table 1)."""
from pathlib import Path

import jax
import numpy as np

from tvjax import compression, evaluation, vectors
from tvjax.compression import sizes
from tvjax.experiment import merges, nonoverlap, orders, planning, rows
from tvjax.experiment.study import SPLITS, Bench
from tvjax.experiment.tall_suite import consensus, counts_of, judged_rows, localise
from tvjax.merging import total


def curve(bench: Bench, name: str, taus, anchors) -> list[dict]:
    """Rows of the first n tasks of one order: each base merged, under its Consensus and under TALL-masks, with bits."""
    sequence = orders.order(name, {task: anchors["zero-shot"]["val"][task] for task in taus})
    found = []
    for count in bench.todo.curve_counts:
        tasks = sequence[:count]
        for base in bench.todo.bases:
            for method, accuracy, formula in _three(bench, base, tasks, [taus[task] for task in tasks], anchors):
                values = {"normalised": evaluation.normalised(accuracy, anchors["fine-tuned"]["test"]),
                          "absolute": evaluation.absolute(accuracy)}
                counted = counts_of(bench, tasks)
                shared = {**rows.common(bench.usual, tasks, bench.seed), "method": method, "order": name,
                          "task": rows.AVERAGE, "split": "test", "bits": sizes.formula(formula, counted),
                          "bits_finetuned": sizes.formula("finetuned", counted)}
                found += [{"metric": f"curve {metric}", "value": value, **shared} for metric, value in values.items()]
        bench.say(f"{name}, first {count} tasks, seed {bench.seed}: done")
    return found


def _three(bench, base, tasks, taus, anchors):
    """(method, {task: test accuracy}, formula of its bits)."""
    local = localise(bench, base, tasks, taus)
    grid = planning.Merge("", "", {}, bench.todo.scales)
    scale, _ = merges.choose_scale(bench.about, bench.usual, grid, tasks, local.merged, anchors["fine-tuned"],
                                   cache=bench.cache)
    theta = evaluation.moved(bench.about.theta0, local.merged, scale)
    yield base.label, bench.measure(theta, tasks, "test"), "single"
    yield f"Consensus {base.label}", consensus(bench, local, base.k, tasks, anchors)[0]["test"], "single"
    yield f"TALL + {base.label}", local.accuracy["test"], "tall"


def control(bench: Bench, tasks, taus, anchors, folder: Path, progress=None) -> list[dict]:
    """Rows of task arithmetic on task vectors of usual and of non-overlapping fine-tuning.

    Each is normalised by the models fine-tuned in its own way. The part that a task trained, put on the merged vector
    at α = 1 as its mask, gives the fine-tuned model back.
    """
    masks = nonoverlap.partition(bench.about.theta0, len(tasks), seed=bench.seed)
    apart = {}
    for task, mask in zip(tasks, masks, strict=True):
        apart[task] = nonoverlap.masked_vector(bench.about, bench.usual, task, mask, seed=bench.seed,
                                               folder=folder, progress=progress)
        bench.say(f"{task}, seed {bench.seed}: task vector in a part of its own")
    _check_apart(apart.values())
    found = []
    for way, vectors_ in (("standard", {task: taus[task] for task in tasks}), ("non-overlapping", apart)):
        own = {split: {task: bench.measure(vectors.add(bench.about.theta0, tau), [task], split)[task]
                       for task, tau in vectors_.items()} for split in SPLITS}
        found += _arithmetic(bench, tasks, way, vectors_, {"fine-tuned": own})
    merged = total()(list(apart.values()))
    again = lambda i: compression.reconstruct(bench.about.theta0, merged, masks[i])
    recovered = {split: {task: bench.measure(again(i), [task], split)[task] for i, task in enumerate(tasks)}
                 for split in SPLITS}
    own = {"fine-tuned": {split: {task: bench.measure(vectors.add(bench.about.theta0, apart[task]), [task], split)[task]
                                  for task in tasks} for split in SPLITS}}
    return found + judged_rows(bench, tasks, "non-overlapping: own part of the sum", "control", recovered, own,
                               sizes.formula("single", counts_of(bench, tasks)))


def _arithmetic(bench, tasks, way, taus, own) -> list[dict]:
    tau = total()(list(taus.values()))
    grid = planning.Merge("", "", {}, bench.todo.scales)
    scale, _ = merges.choose_scale(bench.about, bench.usual, grid, tasks, tau, own["fine-tuned"],
                                   cache=bench.cache)
    theta = evaluation.moved(bench.about.theta0, tau, scale)
    merged = {split: bench.measure(theta, tasks, split) for split in SPLITS}
    bits = sizes.formula("single", counts_of(bench, tasks))
    return [*judged_rows(bench, tasks, f"{way}: fine-tuned", "control", own["fine-tuned"], own, bits),
            *judged_rows(bench, tasks, f"{way}: task arithmetic", "control", merged, own, bits, scale=scale)]


def _check_apart(taus) -> None:
    """That no entry is moved by two tasks; the study would show nothing otherwise."""
    for leaves in zip(*map(jax.tree.leaves, taus), strict=True):
        if np.any(np.sum([np.asarray(x) != 0 for x in leaves], axis=0) > 1):
            raise ValueError("two task vectors of the non-overlapping control move the same entry")


