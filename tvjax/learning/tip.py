"""Tip-Adapter, fine-tuned (Zhang et al., 2022, arXiv:2207.09519): a cache of few-shot features beside the text head.

logits = z + β₂ · exp(−β₁ (1 − a)) Y, a = f Wᵀ, f the unit feature of an image, W the cached features of the shots
(trained), Y their labels, one-hot; (β₁, β₂) start at (1, 2) and are trained too. Alone it adapts the pretrained model;
`joint` trains it together with the coefficients of task vectors (arXiv:2407.02880, §5.2).
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import evaluation
from tvjax.evaluation.heads import unit
from tvjax.evaluation.top1 import padded
from tvjax.learning.course import Course, Learned, Verdict, learn
from tvjax.learning.fewshot import steps_of
from tvjax.learning.heads import join, together
from tvjax.learning.views import view
from tvjax.learning.ways import Way

ALONE = Course(epochs=300, batch=256, lr=1e-3, decay="cosine")
JOINT = Course(epochs=20, lr=0.1, decay="cosine")
RATE = 1e-3  # of the cache; β and the coefficients have the course's rate


def features(way: Way, point: Any, inputs: Any, *, width: int, batch: int = 250) -> np.ndarray:
    """The features (examples, width) on which the head acts, of unit length where the model's are."""
    found = [np.asarray(_features(point, jnp.eye(width), part, predict=way.predict))[:real]
             for part, real in padded(inputs, batch=batch)]
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnames="predict")
def _features(point, eye, inputs, *, predict):
    return predict(point, eye, inputs)


def start(cached: Any) -> dict:
    """The adapter before training: the cache of unit features (shots, width) and (β₁, β₂) = (1, 2)."""
    return {"cache": unit(jnp.asarray(cached, jnp.float32)), "beta": jnp.array([1.0, 2.0])}


def logits(adapter: dict, f: Any, text: Any, onehot: Any) -> Any:
    """text + β₂ · exp(−β₁(1 − f·Wᵀ)) Y; f: (images, width), text: (images, classes), onehot: (shots, classes).

    >>> adapter = start(np.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> logits(adapter, jnp.array([[1.0, 0.0]]), jnp.zeros((1, 2)), jnp.eye(2)).round(3).tolist()
    [[2.0, 0.736...]]
    """
    affinity = unit(f) @ adapter["cache"].T
    return text + adapter["beta"][1] * jnp.exp(-adapter["beta"][0] * (1 - affinity)) @ onehot


def alone(cached: Any, labels: Any, head: Any, val: tuple[Any, Any] | None, *, course: Course = ALONE) -> Learned:
    """Trains the adapter on features that do not change. cached, labels: of the shots; val: (features, labels) that
    choose the epoch, None for the last."""
    onehot = jax.nn.one_hot(jnp.asarray(labels), head.shape[1])
    way = Way(start(cached), (jnp.asarray(head), onehot), _adapter, _of_features)
    feed = together([(np.asarray(cached), np.asarray(labels))], (0,), batches=[course.batch], seed=course.seed)
    judge = None if val is None else lambda adapter, epoch: Verdict(accuracy(adapter, val, head, onehot))
    return learn(_alone_loss, way, feed, course, steps=1, judge=judge,
                 transform=_transform(course, course.epochs))


def _adapter(params, frozen):
    return params


def _of_features(point, head, f):
    return f @ head


def _alone_loss(params, batch, key, frozen):
    f, labels, _ = batch
    (head, onehot), _ = frozen
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, f, f @ head, onehot), labels).mean()


def accuracy(adapter: dict, split: tuple[Any, Any], head: Any, onehot: Any) -> float:
    """Accuracy on (features, labels)."""
    f, labels = split
    found = logits(adapter, jnp.asarray(f), jnp.asarray(f) @ jnp.asarray(head), onehot)
    return float((np.asarray(found.argmax(-1)) == np.asarray(labels)).mean())


def joint(way: Way, head: Any, few: Any, val: Any, *, course: Course = JOINT, augment: str = "crop and flip",
          batch: int = 250) -> Learned:
    """Trains coefficients and adapter together; `params` are {"way", "adapter"}, for `joint_way`."""
    both = joint_way(way, head, few, batch=batch)
    joined = join([head], columns=1)
    feed = together([few], joined.offsets, batches=[course.batch], seed=course.seed)
    judge = lambda point, epoch: Verdict(evaluation.accuracy(both.predict, point, joined.head, tuple(val), batch=batch))
    return learn(_joint_loss(both.point, both.predict, augment), both, feed, course, steps=steps_of(few, course),
                 judge=judge, extras=joined.head, transform=_transform(course, course.epochs * steps_of(few, course)))


def joint_way(way: Way, head: Any, few: Any, *, batch: int = 250) -> Way:
    """Task vectors and adapter as one way; its models go with `predict` of the same way and the task's head."""
    inputs, labels = few
    point = way.point(way.start, way.frozen)
    cached = features(way, point, inputs, width=head.shape[0], batch=batch)
    onehot = jax.nn.one_hot(jnp.asarray(labels), head.shape[1])
    return Way({"way": way.start, "adapter": start(cached)}, (way.frozen, onehot), _both(way.point),
               _predict(way.predict))


@functools.cache
def _both(point):
    return lambda params, frozen: (point(params["way"], frozen[0]), params["adapter"], frozen[1])


@functools.cache
def _predict(predict):
    def adapted(point, head, inputs):
        theta, adapter, onehot = point
        f = predict(theta, jnp.eye(head.shape[0]), inputs)
        wide = jnp.pad(onehot, ((0, 0), (0, head.shape[1] - onehot.shape[1])))
        return logits(adapter, f, f @ head, wide)
    return adapted


@functools.cache
def _joint_loss(point, predict, augment):
    draw = view(augment)

    def loss(params, batch, key, frozen):
        inputs, labels, _ = batch
        own, head = frozen
        inputs = inputs if draw is None else draw(key, inputs)
        found = predict(point(params, own), head, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()
    return loss


@functools.lru_cache
def _rates(lr: float, weight_decay: float, clip: float, steps: int):
    part = lambda rate: optax.adamw(optax.cosine_decay_schedule(rate, steps), weight_decay=weight_decay)
    label = lambda path, _: "cache" if any(getattr(k, "key", "") == "cache" for k in path) else "rest"
    labels = lambda params: jax.tree_util.tree_map_with_path(label, params)
    rates = optax.partition({"cache": part(RATE), "rest": part(lr)}, labels)
    return optax.chain(optax.clip_by_global_norm(clip), rates)


def _transform(course: Course, steps: int):
    rate = 0.1 if course.lr == RATE else course.lr  # alone, β has the rate that the joint course gives it
    return _rates(rate, course.weight_decay, course.clip, steps)
