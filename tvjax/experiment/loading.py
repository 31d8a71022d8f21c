"""What an experiment is about: a pretrained model, its frozen heads, and the data of every task and of the control.

A suite makes the problem from the plan; jobs see only parameters, `predict` and trees of arrays.
"""
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tvjax import checkpoints, evaluation, training, vectors
from tvjax.experiment.planning import SPLITS, Plan
from tvjax.models import folders

SUITES = {"glyphs": "glyph_suite", "arrays": "array_suite", "text": "text_suite", "vision": "vision_suite",
          "questions": "question_suite"}


def over_classes(score: Callable, head, classes, inputs, labels, *, smoothing: float = 0.0):
    """The usual criterion, cross-entropy over the first `classes` columns of score(head, inputs) -> logits.

    The heads of a suite are padded to one width, so that all its tasks share one compiled step.
    """
    logits = score(head, inputs)
    known = jnp.arange(logits.shape[-1])[None] < classes
    return training.cross_entropy(jnp.where(known, logits, -1e9), labels, smoothing=smoothing)


class Problem(NamedTuple):
    """`theta0` holds what fine-tuning moves; `base` hashes all pretrained weights.

    predict(params, head, inputs) -> logits and encode(params, inputs) -> features take `inputs` as the splits hold
      them: an array, or a tree of arrays, examples first.
    heads {task: (features, classes)}; splits {task: {split: (inputs, labels)}}; keys {task: {split: a hash of base,
      class names, templates, inputs and labels}}, all that an accuracy depends on besides the judged weights. All
      three also hold the task `control` (a name, or None), which no task vector trains on.
    load(path) gives the trained part of a model on disk; save(params, path) writes a whole model folder. sources says
      of each task where it was read from and how it was split. readout: what heads see of features, `unit` or `plain`.
    criterion: what fine-tuning minimises, see `over_classes`. metrics {task: (answers, labels) -> a share}: of tasks
      that are not judged by the share of right answers. judge: like predict, where answers are found in another way
      than by the scores that have gradients, or None; `judging` is what accuracies are taken by, of `point(θ)`. place:
      `paired` where models are judged linearised at θ0, see `tvjax.evaluation.points`.
    """

    pretrained: Any
    theta0: Any
    predict: Callable
    heads: dict[str, Any]
    splits: dict[str, dict[str, Any]]
    base: str
    keys: dict[str, dict[str, str]]
    encode: Any = None
    control: str | None = None
    load: Any = None
    save: Any = None
    sources: dict[str, str] = {}
    readout: Callable = evaluation.unit
    criterion: Callable = over_classes
    metrics: dict[str, Callable] = {}
    judge: Callable | None = None
    place: Callable = evaluation.shifted

    def judged(self, tasks, split: str) -> dict[str, tuple]:
        """{task: (head, (inputs, labels), its metric where it has its own)}, as `tvjax.evaluation` takes them."""
        own = lambda task: (self.metrics[task],) if task in self.metrics else ()
        return {task: (self.heads[task], tuple(self.splits[task][split]), *own(task)) for task in tasks}

    @property
    def judging(self) -> Callable:
        return self.judge or self.predict

    def point(self, theta):
        """What `judging` takes of a model at θ."""
        return theta if self.place is evaluation.shifted else self.place(
            self.theta0, vectors.task_vector(theta, self.theta0))

    def told(self) -> tuple[str, ...]:
        """What a cache has to know of the way of judging."""
        return () if self.place is evaluation.shifted else ("linearised",)

    @property
    def width(self) -> int:
        """Classes of the widest head of the tasks: padded to it, all of them share one compiled step."""
        return max(head.shape[1] for task, head in self.heads.items() if task != self.control)


class Material(NamedTuple):
    """One task: `told` is what names the classes and makes the head, as far as a hash has to know it.

    `source` says where the task was read from and how it was split.
    """

    head: Any
    splits: dict[str, Any]
    told: tuple
    source: str = ""


def problem(plan: Plan) -> Problem:
    """Loads the model and the data of a plan; ValueError where they do not fit or the model is not finite."""
    for path in plan.finetuned.values():
        folders.find(path, None)  # a model that the hub does not give is found out before any other is tuned
    found = importlib.import_module(f"tvjax.experiment.{SUITES[plan.suite]}").load(plan)
    return linearised(found) if plan.geometry == "linearised" else found


def linearised(about: Problem) -> Problem:
    """A problem that judges f(x; θ0) + ∇f(x; θ0)·(θ − θ0) in place of f(x; θ), whatever way θ was tuned."""
    if about.judge is not None:
        raise ValueError("geometry='linearised' judges features, not generated answers: set data.judge='choices'")
    return about._replace(judge=evaluation.classify_linearised(about.encode, about.readout), place=evaluation.paired)


def assemble(plan: Plan, found, materials: dict[str, Material], *, theta0, encode, load, save,
             **more) -> Problem:
    """The problem of a pretrained model (`params`, `path`) and the material of each task; `more`: further fields."""
    base = checkpoints.content_hash(found.params)
    keys = {task: {split: evaluation.content_key(base, *map(_listed, one.told), tuple(one.splits[split]))
                   for split in SPLITS} for task, one in materials.items()}
    control = next((name for name in materials if name not in plan.tasks), None)
    return Problem(found, jax.device_get(theta0), evaluation.classify(encode, more.get("readout", evaluation.unit)),
                   {task: one.head for task, one in materials.items()},
                   {task: one.splits for task, one in materials.items()}, base, keys, encode, control, load, save,
                   {task: one.source for task, one in materials.items()}, **more)


def _listed(part):
    return list(part) if isinstance(part, tuple) else part


def checked(plan: Plan, found):
    """`found`, its weights being finite or the plan allowing that they are not."""
    if not plan.allow_nonfinite:
        check_finite(found.params, found.path)
    return found


def check_finite(params, where) -> None:
    """Raises ValueError naming the tensor, and how to go on all the same."""
    try:
        checkpoints.check_finite(params)
    except ValueError as error:
        raise ValueError(f"{where}: {error} Set allow_nonfinite to go on all the same.") from None
