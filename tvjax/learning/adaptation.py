"""Test-time adaptation on the unlabelled images of a target (arXiv:2407.02880, §5.3), offline, no label ever read.

Objectives: contrast of two views (SimCLR, arXiv:2002.05709), entropy of reliable samples under sharpness-aware steps
(SAR, arXiv:2302.12400), and unsupervised FixMatch (UFM, in `tvjax.learning.ufm`). The last epoch is kept: there are no
labels to choose another by.
"""
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import training
from tvjax.learning.course import Course, Learned, learn
from tvjax.learning.heads import COLUMNS, join
from tvjax.learning.views import view
from tvjax.learning.ways import Way

TTA = Course(epochs=10, lr=1e-3, decay="cosine")
TEMPERATURE = 0.1  # of the contrast
RADIUS = 0.05  # of the sharpness-aware step
MARGIN = 0.4  # reliable: an entropy below so much of the largest


def images_feed(inputs: Any, *, batch: int, seed: int) -> tuple[Callable, int]:
    """(feed, steps of an epoch) over unlabelled inputs; ValueError for a pair with labels."""
    if isinstance(inputs, tuple):
        raise ValueError("adaptation takes inputs alone, not a pair with labels")
    count = training.size(inputs)
    return functools.partial(training.batches, inputs, batch=min(batch, count), seed=seed), -(-count // batch)


# ---------------------------------------------------------------- contrast
def contrast(way: Way, width: int, inputs: Any, *, course: Course = TTA, augment: str = "crop and flip",
             temperature: float = TEMPERATURE) -> Learned:
    """Makes two views of an image alike and views of different images unlike.

    width: of the features. The loss is normalised-temperature cross-entropy over the 2N views of a batch.
    """
    if augment == "none":
        raise ValueError("contrast needs two different views of an input: choose an augmentation")
    feed, steps = images_feed(inputs, batch=max(2, course.batch), seed=course.seed)
    loss = _contrast(way.point, way.predict, augment, temperature)
    return learn(loss, way, feed, course, steps=steps, extras=jnp.eye(width))


@functools.cache
def _contrast(point, predict, augment, temperature):
    draw: Any = view(augment)  # None is refused beforehand

    def loss(params, inputs, key, frozen):
        own, eye = frozen
        views = jnp.concatenate([draw(k, inputs) for k in jax.random.split(key)])
        return nt_xent(predict(point(params, own), eye, views), temperature=temperature)
    return loss


def nt_xent(f: Any, *, temperature: float = TEMPERATURE) -> Any:
    """SimCLR's loss of 2N features, view i beside view N + i: mean CE of finding the other view among 2N − 1.

    >>> float(nt_xent(jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))) < 1e-3
    True
    """
    f = f / jnp.maximum(jnp.linalg.norm(f, axis=-1, keepdims=True), 1e-12)
    size = f.shape[0]
    near = jnp.where(jnp.eye(size, dtype=bool), -jnp.inf, f @ f.T / temperature)
    other = (jnp.arange(size) + size // 2) % size
    return optax.softmax_cross_entropy_with_integer_labels(near, other).mean()


# ---------------------------------------------------------------- entropy
def entropy(way: Way, head: Any, inputs: Any, *, course: Course = TTA, radius: float = RADIUS,
            margin: float = MARGIN) -> Learned:
    """Makes reliable answers surer, in a direction that is flat: SAR.

    A sample counts where its entropy is below margin·ln C, at λ and at λ + radius·∇/‖∇‖; the step is the gradient at
    the latter. radius = 0 is entropy minimisation with a filter. The share of samples that counted is in no row; see
    `reliable`.
    """
    feed, steps = images_feed(inputs, batch=course.batch, seed=course.seed)
    joined = join([head], columns=COLUMNS)
    limit = jnp.float32(margin * math.log(head.shape[1]))
    return learn(_sar(way.point, way.predict), way, feed, course, steps=steps,
                 extras=(joined.head, joined.owner >= 0, limit, jnp.float32(radius)))


@functools.cache
def _sar(point, predict):
    def loss(params, inputs, key, frozen):
        own, (head, known, limit, radius) = frozen
        answers = lambda params: entropies(predict(point(params, own), head, inputs), known)

        def first(params):
            found = answers(params)
            counted = reliable(found, limit)
            return counted_mean(found, counted), counted
        slope, counted = jax.grad(first, has_aux=True)(params)
        length = optax.tree.norm(slope)
        step = radius / jnp.maximum(length, 1e-12)
        there = jax.tree.map(lambda x, g: x + jax.lax.stop_gradient(step * g), params, slope)
        found = answers(there)
        return counted_mean(found, counted * reliable(found, limit))
    return loss


def entropies(logits, known):
    """Entropy in nats of each row over its `known` columns."""
    logs = jax.nn.log_softmax(jnp.where(known[None], logits.astype(jnp.float32), -1e9))
    return -(jnp.exp(logs) * jnp.where(known[None], logs, 0)).sum(-1)


def reliable(entropies, limit):
    """1 where an entropy is below the limit, 0 elsewhere, without a derivative."""
    return jax.lax.stop_gradient((entropies < limit).astype(entropies.dtype))


def counted_mean(x, weights):
    """The mean of x over the weights, 0 where none counts."""
    return (x * weights).sum() / jnp.maximum(weights.sum(), 1)


def unlabelled(split: Any) -> Any:
    """The inputs of a split, its labels left behind."""
    return jax.tree.map(np.asarray, tuple(split)[0])
