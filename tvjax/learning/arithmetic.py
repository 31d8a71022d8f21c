"""Task addition and negation with learned scaling (arXiv:2407.02880, §4 and appendix A).

Addition minimises Σ_d CE_d on the validation splits and keeps the epoch of the best average normalised accuracy there.
Negation minimises −CE of the target + CE of the control and keeps the epoch with the least accuracy on the target among
those with at least 95 % of the pretrained model's accuracy on the control; the course ends at the first breach.
"""
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from tvjax import evaluation
from tvjax.evaluation.scales import SLACK
from tvjax.learning.course import Course, Learned, Verdict, epoch_steps, learn
from tvjax.learning.heads import join, sized, tasks_of, together, weighted
from tvjax.learning.ways import Way

ADDITION = Course()
NEGATION = Course(epochs=10)
TIMES = {"cars": 5, "dtd": 10, "eurosat": 5, "gtsrb": 5, "mnist": 3, "resisc45": 2, "sun397": 3, "svhn": 5}
EPOCHS = {"cars": 20, "dtd": 20, "eurosat": 3, "gtsrb": 5, "mnist": 7, "resisc45": 10, "sun397": 10, "svhn": 2}
CONTROL = 0.95


def addition(way: Way, heads: Mapping[str, Any], splits: Mapping[str, Any], finetuned: Mapping[str, float], *,
             course: Course = ADDITION, judged: Mapping[str, Any] | None = None, p: int = 0, strength: float = 0.5,
             batch: int = 250) -> Learned:
    """Learns to do all tasks at once.

    heads, splits: {task: head}, {task: (inputs, labels)}; a step takes course.batch/tasks examples of each, an epoch
      ends with the shortest split. finetuned: the accuracies that normalise. judged: the splits that select, those
      learned from where None (as in the paper). p, strength: the penalty's.
    """
    tasks = tasks_of(heads, splits)
    each = course.batch // len(tasks)
    if each < 1:
        raise ValueError(f"a batch of {course.batch} has no example for each of {len(tasks)} tasks")
    selecting = splits if judged is None else judged
    joined = join(list(heads.values()))

    def judge(point, epoch):
        found = {task: evaluation.accuracy(way.predict, point, heads[task], tuple(selecting[task]), batch=batch)
                 for task in tasks}
        return Verdict(evaluation.normalised(found, finetuned), told=(evaluation.absolute(found),))

    feed = together(list(splits.values()), joined.offsets, batches=[each] * len(tasks), seed=course.seed)
    return learn(weighted(way.point, way.predict, p=p, strength=strength), way, feed, course, judge=judge,
                 steps=epoch_steps([sized(split) for split in splits.values()], each),
                 extras=(joined.head, joined.owner, jnp.ones(len(tasks))))


def negation(way: Way, heads: tuple[Any, Any], splits: tuple[Any, Any], *, course: Course = NEGATION,
             threshold: float = CONTROL, judged: tuple[Any, Any] | None = None, batch: int = 250) -> Learned:
    """Learns to forget the first of two tasks and to keep the second, the control.

    The verdicts tell (target, control); epoch 0, the start, is the answer where no epoch keeps the control.
    """
    joined, each = join(list(heads)), max(1, course.batch // 2)
    selecting = splits if judged is None else judged
    start: list[float] = []

    def judge(point, epoch):
        target, control = (evaluation.accuracy(way.predict, point, head, tuple(split), batch=batch)
                           for head, split in zip(heads, selecting, strict=True))
        start.append(control)
        kept = epoch == 0 or control >= threshold * start[0] - SLACK  # the pretrained model always may be chosen
        return Verdict(-target if kept else -float("inf"), not kept, (target, control))

    feed = together(list(splits), joined.offsets, batches=[each, each], seed=course.seed)
    return learn(weighted(way.point, way.predict), way, feed, course, judge=judge,
                 steps=epoch_steps([sized(split) for split in splits], each),
                 extras=(joined.head, joined.owner, jnp.array([-1.0, 1.0])))


def negation_course(task: str, course: Course = NEGATION) -> Course:
    """The paper's rate and epochs for a task, where it has them; the course as given elsewhere.

    >>> negation_course("dtd").lr, negation_course("dtd").epochs, negation_course("greek").lr
    (0.01, 20, 0.001)
    """
    if task not in TIMES:
        return course
    return dataclasses.replace(course, lr=1e-3 * TIMES[task], epochs=EPOCHS[task])
