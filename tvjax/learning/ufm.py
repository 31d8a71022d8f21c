"""Unsupervised FixMatch (arXiv:2407.02880, §5.3 and appendix D): trusted images as labels, surely guessed ones beside.

At the start of every epoch the images of each class's highest probabilities, min(N/C, 100) of them, become its trusted
set. A batch is ¼ trusted, ¾ other images. On the latter q = p^e/Σp^e of the plain view, without derivative, is the
target of the strong view where max q > ω; ω rises from 0.9 to 1 over the course. Loss: CE of the trusted + Σ CE of the
accepted / how many were accepted.

The exponent e = ½ is the paper's and flattens p; 2 would sharpen it. The released code leaves p as it is (e = 1), holds
ω at 0.99 and chooses the trusted once.
"""
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import training
from tvjax.evaluation.top1 import padded
from tvjax.learning.adaptation import TTA, counted_mean
from tvjax.learning.course import Course, Learned, Verdict, learn
from tvjax.learning.heads import join
from tvjax.learning.views import view
from tvjax.learning.ways import Way

EXPONENT = 0.5
MOST = 100  # trusted images of a class
RAMP = (0.9, 1.0)


class Trust(NamedTuple):
    """Trusted images and the class of each (an image may stand for two), and the images that are in no class's set."""

    rows: np.ndarray
    classes: np.ndarray
    rest: np.ndarray


def sharpen(p: Any, *, exponent: float = EXPONENT) -> Any:
    """p^exponent, rows summing to 1 again.

    >>> sharpen(jnp.array([0.7, 0.2, 0.1])).round(3).tolist()
    [0.523..., 0.279..., 0.198...]
    """
    powers = jnp.power(p, exponent)
    return powers / powers.sum(-1, keepdims=True)


def trusted(p: Any, *, share: float = 1.0, most: int = MOST) -> Trust:
    """For each class the min(share·N/C, most) images that are likeliest to be of it, at least one.

    p: probabilities (N, C). share: 1 is the paper's, 0.1 the released code's.

    >>> trusted(np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]]), share=0.5).rows.tolist()
    [0, 2]
    """
    p = np.asarray(p)
    count = max(1, min(int(share * p.shape[0] / p.shape[1]), most))
    rows = np.argsort(-p, axis=0, kind="stable")[:count].T
    classes = np.repeat(np.arange(p.shape[1]), count)
    rest = np.setdiff1d(np.arange(p.shape[0]), rows)
    return Trust(rows.ravel(), classes, rest)


def threshold(step, steps: int, ramp: tuple[float, float] = RAMP):
    """ω at a step: linear from ramp[0] at the first to ramp[1] at the last."""
    return ramp[0] + (ramp[1] - ramp[0]) * step / max(steps - 1, 1)


def ufm(way: Way, head: Any, inputs: Any, *, course: Course = TTA, augment: str = "crop and flip",
        exponent: float = EXPONENT, ramp: tuple[float, float] = RAMP, share: float = 1.0, most: int = MOST,
        batch: int = 250) -> Learned:
    """Adapts to unlabelled `inputs`. The verdicts tell (images trusted, images left)."""
    count, joined = training.size(inputs), join([head])
    steps = max(1, -(-count // course.batch))
    now: list[Trust] = []

    def judge(point, epoch):
        p = probabilities(way, point, joined, head.shape[1], inputs, batch=batch)
        now[:] = [trusted(p, share=share, most=most)]
        return Verdict(float(epoch), told=(len(np.unique(now[0].rows)), len(now[0].rest)))

    feed = _feed(inputs, now, course, steps, ramp)
    loss = _loss(way.point, way.predict, augment, exponent)
    return learn(loss, way, feed, course, steps=steps, judge=judge, extras=(joined.head, joined.owner >= 0))


def probabilities(way: Way, point, joined, classes: int, inputs, *, batch: int) -> np.ndarray:
    """Softmax of the model's logits, (images, classes)."""
    found = [np.asarray(_probabilities(point, joined.head, joined.owner >= 0, part, predict=way.predict))[:real]
             for part, real in padded(inputs, batch=batch)]
    return np.concatenate(found)[:, :classes]


@functools.partial(jax.jit, static_argnames="predict")
def _probabilities(point, head, known, inputs, *, predict):
    return jax.nn.softmax(jnp.where(known[None], predict(point, head, inputs).astype(jnp.float32), -1e9))


def _feed(inputs, now: list[Trust], course: Course, steps: int, ramp):
    """Batches (images, classes, trusted?, ω), the trusted first; `now` holds the sets of the epoch."""
    def feed(start: int = 0) -> Iterator:
        for step in range(start, course.epochs * steps):
            rows, classes, sure = compose_batch(now[0], batch=course.batch, step=step, seed=course.seed)
            images = jax.tree.map(lambda x, rows=rows: x[rows], inputs)
            omega = threshold(step, course.epochs * steps, ramp)
            yield images, classes, sure, np.full(len(rows), omega, np.float32)
    return feed


def compose_batch(trust: Trust, *, batch: int, step: int, seed: int):
    """(images, classes, trusted?) of a step: ⌈batch/4⌉ trusted with their classes, the others with class 0."""
    rng = np.random.default_rng((seed, step))
    quarter = -(-batch // 4)
    pick = rng.choice(len(trust.rows), quarter, replace=len(trust.rows) < quarter)
    others = trust.rest if len(trust.rest) else np.unique(trust.rows)  # where all are trusted, they are guessed too
    rest = rng.choice(others, batch - quarter, replace=len(others) < batch - quarter)
    classes = np.concatenate([trust.classes[pick], np.zeros(batch - quarter, int)]).astype(np.int32)
    return np.concatenate([trust.rows[pick], rest]), classes, np.arange(batch) < quarter


@functools.cache
def _loss(point, predict, augment, exponent):
    draw = view(augment)

    def loss(params, batch, key, frozen):
        inputs, classes, sure, omega = batch
        own, (head, known) = frozen
        theta = point(params, own)
        logits = lambda images: jnp.where(known[None], predict(theta, head, images).astype(jnp.float32), -1e9)
        strong = logits(inputs if draw is None else draw(key, inputs))
        guess = jax.lax.stop_gradient(sharpen(jax.nn.softmax(logits(inputs)), exponent=exponent))
        return objective(strong, guess, classes, sure, omega[0])
    return loss


def objective(strong, guess, classes, sure, omega):
    """CE of the trusted (mean) + CE against the guesses that exceed ω (mean over these)."""
    labelled = optax.softmax_cross_entropy_with_integer_labels(strong, classes)
    guessed = optax.softmax_cross_entropy(strong, guess)
    sure = sure.astype(strong.dtype)
    accepted = (1 - sure) * (guess.max(-1) > omega).astype(strong.dtype)
    return counted_mean(labelled, sure) + counted_mean(guessed, accepted)
