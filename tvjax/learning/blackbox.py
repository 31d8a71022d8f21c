"""Coefficients without gradients, by CMA-ES from the package cma: only losses are asked.

arXiv:2407.02880 (appendix D) does it with nevergrad: enough for one number a vector, too little for one a tensor.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from tvjax.evaluation.gradient_free import minimise
from tvjax.evaluation.top1 import padded
from tvjax.learning.heads import Joined, masked
from tvjax.learning.ways import Way, model


class Found(NamedTuple):
    """The best numbers, their loss, and the losses in the order in which they were asked."""

    params: Any
    loss: float
    trace: np.ndarray


def gradient_free(way: Way, evaluate: Callable[[Any], float], *, budget: int, seed: int = 0, spread: float = 0.3,
                  reach: float = 1.5) -> Found:
    """The best of `budget` questions evaluate(point) -> loss, the start asked first; numbers stay within ±reach of it.

    spread: the standard deviation of the first generation. Needs cma: pip install 'tvjax[search]'.
    """
    flat, shape = ravel_pytree(way.start)
    at = lambda step: shape(flat + jnp.asarray(step, flat.dtype))
    found = minimise(lambda step: evaluate(model(way, at(step))), np.zeros(flat.size), bounds=(-reach, reach),
                     budget=budget, seed=seed, spread=spread)
    return Found(jax.device_get(at(found.best)), found.value, np.array([value for _, value in found.trace]))


def mean_loss(way: Way, joined: Joined, batch: Any, *, size: int = 128) -> Callable[[Any], float]:
    """evaluate(point): the mean cross-entropy over a batch (inputs, labels in the joined head, task)."""
    def evaluate(point):
        total = sum(float(_losses(point, joined.head, joined.owner, *part, np.arange(size) < real, predict=way.predict))
                    for part, real in padded(batch, batch=size))
        return total / len(batch[1])
    return evaluate


@functools.partial(jax.jit, static_argnames="predict")
def _losses(point, head, owner, inputs, labels, task, counted, *, predict):
    logits = masked(predict(point, head, inputs), owner, task)
    return jnp.where(counted, optax.softmax_cross_entropy_with_integer_labels(logits, labels), 0).sum()
