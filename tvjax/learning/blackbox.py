"""Coefficients without gradients, by nevergrad (the baseline of arXiv:2407.02880, appendix D): only losses are asked.

Enough for one number a vector; with one a tensor it fails, which is the point of the comparison.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import tree
from tvjax.evaluation.top1 import padded
from tvjax.learning.heads import Joined, masked
from tvjax.learning.ways import Way, model


class Found(NamedTuple):
    """The best numbers, their loss, and the losses in the order in which they were asked."""

    params: Any
    loss: float
    trace: np.ndarray


def gradient_free(way: Way, evaluate: Callable[[Any], float], *, budget: int, seed: int = 0, method: str = "NGOpt",
                  reach: float = 1.5) -> Found:
    """The best of `budget` questions evaluate(point) -> loss, the start asked first; numbers stay within ±reach of it.

    method: a name in nevergrad's registry. Needs nevergrad: pip install 'tvjax[blackbox]'.
    """
    try:
        import nevergrad
    except ImportError:
        raise ValueError("gradient-free learning needs nevergrad: pip install 'tvjax[blackbox]'") from None
    if budget < 1:
        raise ValueError(f"the budget counts questions, from 1 on; got {budget}")
    if method not in nevergrad.optimizers.registry:
        near = tree.did_you_mean(method, ["NGOpt", "CMA", "DE", "PSO", "OnePlusOne", "RandomSearch"])
        raise ValueError(f"nevergrad has no optimiser {method!r}; {near}")
    flat, shape = jax.flatten_util.ravel_pytree(way.start)
    origin = np.asarray(flat, np.float64)
    space = nevergrad.p.Array(init=origin).set_bounds(origin - reach, origin + reach)
    space.random_state.seed(seed)
    optimiser = nevergrad.optimizers.registry[method](parametrization=space, budget=budget)
    optimiser.suggest(origin)
    best, trace = (origin, np.inf), []
    for _ in range(budget):
        asked = optimiser.ask()
        loss = float(evaluate(model(way, shape(jnp.asarray(asked.value, jnp.float32)))))
        optimiser.tell(asked, loss if np.isfinite(loss) else 1e9)
        trace.append(loss)
        best = (asked.value, loss) if loss < best[1] else best
    return Found(jax.device_get(shape(jnp.asarray(best[0], jnp.float32))), float(best[1]), np.array(trace))


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
