"""Few-shot recognition: k labelled images a class, a pool without the target's own vector (arXiv:2407.02880, §5.1).

CE on the k·C images under random crops; small sets are drawn again and again, so that an epoch has at least ten
batches; the best epoch by validation accuracy, never worse there than zero-shot.
"""
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tvjax import evaluation
from tvjax.learning.course import Course, Learned, Verdict, learn
from tvjax.learning.heads import join, labelled, sized, some, together, weighted
from tvjax.learning.views import view
from tvjax.learning.ways import Way

FEWSHOT = Course(epochs=10, lr=0.1, decay="cosine")
LEAST_STEPS = 10
SHOTS = (1, 2, 4, 8, 16)


def shots(split: Any, k: int, *, classes: int, seed: int) -> tuple:
    """k random examples of every class, those of a smaller k with the same seed among them.

    Raises ValueError where a class has fewer.

    >>> split = np.arange(6), np.array([0, 1, 0, 1, 0, 1])
    >>> sorted(shots(split, 2, classes=2, seed=0)[1].tolist())
    [0, 0, 1, 1]
    """
    labels = np.asarray(labelled(split)[1])
    counts = np.bincount(labels, minlength=classes)
    if k < 1 or counts.min() < k:
        least = int(counts.argmin())
        raise ValueError(f"{k} shots are asked for, and class {least} has {counts.min()} examples")
    order = np.random.default_rng(seed).permutation(len(labels))
    return some(split, np.concatenate([order[labels[order] == c][:k] for c in range(classes)]))


def without(taus: Mapping[str, Any], target: str) -> dict[str, Any]:
    """The task vectors of all tasks but the target: what was learned from its data must not help it."""
    left = {name: tau for name, tau in taus.items() if name != target}
    if not left:
        raise ValueError(f"the pool holds the vector of {target} alone, and that may not be used for it")
    return left


def few_shot(way: Way, head: Any, few: Any, val: Any, *, course: Course = FEWSHOT, augment: str = "crop and flip",
             batch: int = 250) -> Learned:
    """Learns from the examples `few`, (inputs, labels), of one task; `val` chooses the epoch, the start among them."""
    joined = join([head])
    feed = together([few], joined.offsets, batches=[course.batch], seed=course.seed)
    loss = weighted(way.point, way.predict, view=view(augment))
    return learn(loss, way, feed, course, steps=steps_of(few, course), judge=by_accuracy(way, head, val, batch=batch),
                 extras=(joined.head, joined.owner, jnp.ones(1)))


def steps_of(few: Any, course: Course) -> int:
    """Steps of an epoch: one pass, and ten at least."""
    return max(LEAST_STEPS, -(-sized(few) // course.batch))


def by_accuracy(way: Way, head: Any, val: Any, *, batch: int = 250) -> Callable:
    """A judge by the accuracy on one split."""
    def judge(point, epoch):
        return Verdict(evaluation.accuracy(way.predict, point, head, tuple(val), batch=batch))
    return judge
