"""Analyses of sparse fine-tuning: what θ0 bears to lose where a mask lies, what masks share and hold, localisation,
linear behaviour, cost.

Every study takes a bench and the ways of fine-tuning by label, and gives rows.
"""
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import calibration, evaluation, merging, training, tree
from tvjax.experiment import rows
from tvjax.experiment.study import Bench
from tvjax.experiment.talos_plan import ADAPTERS
from tvjax.experiment.talos_suite import Way
from tvjax.experiment.talos_tuning import ingredients, padded_head, recipe

PER_TASK = 64  # examples of each task on which logits' derivatives are taken
MAIN = ("full", "talos", "lota")  # ways whose localisation and linearity are looked at


def pruning(bench: Bench, ways: dict[str, Way]) -> list[dict]:
    """Zero-shot accuracy on task j, over that of θ0, with the entries of task i's mask set to zero."""
    theta0 = bench.about.theta0
    return [row for label, its in masks_of(ways) for task in bench.usual.tasks
            for row in _heat(bench, "pruning", label, task, calibration.pruned(theta0, its[task]))]


def noise(bench: Bench, ways: dict[str, Way]) -> list[dict]:
    """The same under noise of twice their own deviation on these entries; with their mean magnitude and deviation."""
    found = []
    for label, its in masks_of(ways, "talos"):
        for i, task in enumerate(bench.usual.tasks):
            made = calibration.noised(bench.about.theta0, its[task], jax.random.key(1000 * bench.seed + i))
            found += _heat(bench, "noise", label, task, made.params)
            base = {"method": label, "section": "noise", "task": task, "split": "none", **_common(bench)}
            found += [{"metric": "mean magnitude", "value": made.mean, **base},
                      {"metric": "deviation", "value": made.std, **base}]
    return found


def masked(ways: dict[str, Way], *names: str):
    """(label, way) of the ways of those names, by default TaLoS' masks and what they are compared with."""
    names = names or ("talos", "random", "top_sensitivity", "magnitude")
    return [(label, one) for label, one in ways.items() if one.tuning.name in names]


def masks_of(ways: dict[str, Way], *names: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(label, {task: mask}) of those that have masks."""
    return [(label, one.masks) for label, one in masked(ways, *names) if one.masks is not None]


def _heat(bench: Bench, section: str, label: str, task: str, params) -> list[dict]:
    tasks = bench.usual.tasks
    whole, found = bench.measure(bench.about.theta0, tasks, "test"), bench.measure(params, tasks, "test")
    return [{"metric": f"{section} ratio", "value": found[other] / whole[other], "method": label, "section": section,
             "task": task, "other": other, "split": "test", "accuracy": found[other], **_common(bench)}
            for other in tasks]


def _common(bench: Bench) -> dict[str, Any]:
    return bench.common(bench.usual.tasks)


def masks(bench: Bench, ways: dict[str, Way]) -> list[dict]:
    """What the masks of two tasks share, and where their entries lie, by kind of tensor and layer."""
    tasks, found = list(bench.usual.tasks), []
    for label, one in ways.items():
        if one.masks is None or one.tuning.name in ("attention", "bitfit"):
            continue
        shared = calibration.iou([one.masks[task] for task in tasks])
        density = np.mean([calibration.count(one.masks[t]) / tree.size(one.masks[t]) for t in tasks])
        base = {"method": label, "section": "masks", "split": "none", **_common(bench)}
        found += [{"metric": "mask iou", "value": float(shared[i, j]), "task": a, "other": b, **base}
                  for i, a in enumerate(tasks) for j, b in enumerate(tasks)]
        found.append({"metric": "iou by chance", "value": calibration.chance(float(density)), "task": rows.AVERAGE,
                      **base})
        for task in tasks:
            for by in ("kind", "layer"):
                whole = calibration.count(one.masks[task])
                found += [{"metric": "occupancy", "value": kept / whole, "task": task, "by": by, "group": group,
                           "filled": kept / entries, **base}
                          for group, (kept, entries) in calibration.occupancy(one.masks[task], by=by).items()]
    return found


def localisation(bench: Bench, ways: dict[str, Way]) -> list[dict]:
    """|τᵀ∇z| of task i's vector on task j's test inputs, as it is and after the trim and the signs of TIES."""
    found = []
    for label, one in masked(ways, *MAIN):
        taus = [one.taus[task] for task in bench.usual.tasks]
        ties = merging.top(density=0.2) | merging.agree()
        after = tree.unstack(jax.device_get(ties(tree.stack([dict(tau) for tau in taus]))))
        for name, part in ((label, taus), (f"{label} + ties", after)):
            found += [row for i, tau in enumerate(part) for row in _slopes(bench, name, i, dict(tau))]
    return found


def _slopes(bench: Bench, label: str, i: int, tau) -> list[dict]:
    """Rows of one vector: the derivative's magnitude on each task's inputs, and relative to that on its own."""
    logits, tasks = calibration.of_classifier(bench.about.predict), bench.usual.tasks
    values = {}
    for task in tasks:
        head, classes = padded_head(bench, task)
        inputs = jax.tree.map(lambda x: x[:PER_TASK], bench.about.splits[task]["test"][0])
        values[task] = calibration.localisation(logits, bench.about.theta0, tau, inputs, {}, head, np.int32(classes),
                                                classes=classes)
    base = {"method": label, "section": "localisation", "task": tasks[i], "split": "test", **_common(bench)}
    return [{"metric": "localisation", "value": value, "other": other, "relative": value / max(values[tasks[i]], 1e-12),
             **base} for other, value in values.items()]


def linear(bench: Bench, ways: dict[str, Way]) -> list[dict]:
    """Test accuracy of a tuned model and of its linearisation at θ0, for every task."""
    about, found = bench.about, []
    if about.encode is None:
        return []
    predict = evaluation.classify_linearised(about.encode, about.readout)
    for label, one in masked(ways, *MAIN):
        for task in bench.usual.tasks:
            judge = lambda task=task, tau=one.taus[task]: evaluation.accuracy(
                predict, evaluation.moved(about.theta0, tau, 1.0, place=evaluation.paired), *about.judged(
                    [task], "test")[task], batch=bench.usual.batch)
            value = evaluation.cached(bench.cache, judge, "linearised", one.taus[task], about.keys[task]["test"])
            tuned, classes = one.single["test"][task], int(about.heads[task].shape[1])
            found.append({"metric": "linear accuracy", "value": value, "method": label, "section": "linear",
                          "task": task, "split": "test", "tuned": tuned, "advantage": evaluation.nonlinear_advantage(
                              tuned, value, classes=classes), **_common(bench)})
    return found


def cost(bench: Bench, ways: dict[str, Way]) -> list[dict]:
    """Bytes of a step: parameters, gradients, optimizer state, mask, and what the backward pass keeps, plain and with
    blocks computed again."""
    task, found = bench.usual.tasks[0], []
    for label, one in ways.items():
        if one.tuning.name in ADAPTERS:  # counted by `trainable`; its step is that of another network
            continue
        mine = recipe(bench, one.tuning)
        mask = None if one.masks is None or one.tuning.options.get("off") else one.masks[task]
        sizes = training.training_bytes(bench.about.theta0, mask)
        kept = {"activations": _held(bench, task, mask, mine, None),
                "activations, recomputed": _held(bench, task, mask, mine, training.rematerialised)}
        base = {"method": label, "section": "cost", "task": rows.AVERAGE, "split": "none", **_common(bench)}
        found += [{"metric": "bytes", "value": value, "what": what, **base}
                  for what, value in {**sizes, **kept}.items()]
    return found


def _held(bench: Bench, task: str, mask, mine, wrap) -> int:
    """Bytes that the backward pass of one step keeps."""
    theta0 = bench.about.theta0
    names = list(tree.flatten(theta0)) if mask is None else training.touched(mask)
    trained, still = tree.partition(theta0, names)
    loss, feed, frozen = ingredients(bench, task, mine)
    if wrap is not None:
        loss = _loss_of(bench.about.encode, wrap, mine.label_smoothing, bench.about.readout, bench.about.criterion)
    batch = next(iter(feed(start=0)))
    f = lambda part, still, batch: loss(tree.union(part, still), batch, None, frozen)
    return training.held_bytes(f, trained, jax.tree.map(jnp.asarray, still), batch)


@functools.cache
def _loss_of(encode, wrap, smoothing, readout, criterion):
    from tvjax.experiment import finetune
    return finetune.loss(evaluation.classify(wrap(encode), readout), smoothing, criterion)


STUDIES = {"pruning": pruning, "noise": noise, "masks": masks, "localisation": localisation, "linear": linear,
           "cost": cost}


def studies(bench: Bench, ways: dict[str, Way]) -> list[dict]:
    """The rows of all studies that the plan names."""
    found = []
    for name in bench.todo.studies:
        bench.say(f"{name}, seed {bench.seed}")
        found += STUDIES[name](bench, ways)
    return found


