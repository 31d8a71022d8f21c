"""LP++ (Shakeri et al., 2024, arXiv:2404.02285): a linear probe that blends image features with the text classifier.

logits_c = f·w_c + α_c (f·t_c), f and t_c of unit length; cross-entropy on n shots, by full-batch descent whose rates
follow from the features F (n, width): 4n/λ_max(FᵀF) for W with momentum 0.9, n/(4 max_c Σ_i (f_i·t_c)²) for α, which
moves every tenth step. W starts at the class sums of the features, α at 250 · mean_c mean_{i∈c} f_i·t_c.
On task vectors it is sequential: the coefficients are learned first, then frozen.
"""
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax.evaluation.heads import unit

EPOCHS = 300
EVERY = 10  # steps between two of α
MOMENTUM = 0.9


class Probe(NamedTuple):
    """Weights (width, classes), α (classes,), and the unit text classifier (width, classes)."""

    weights: Any
    alpha: Any
    text: Any


class Rates(NamedTuple):
    weights: Any
    alpha: Any


def start(f: Any, labels: Any, head: Any) -> tuple[Probe, Rates]:
    """The probe before training and its rates, from features (n, width), labels and the text head."""
    f, text = unit(jnp.asarray(f)), unit(jnp.asarray(head).T).T
    onehot = jax.nn.one_hot(jnp.asarray(labels), text.shape[1])
    if not (np.asarray(onehot.sum(0)) > 0).all():
        raise ValueError("LP++ needs an example of every class")
    scores = f @ text
    own = (onehot * scores / onehot.sum(0, keepdims=True)).sum(0)
    n, largest = f.shape[0], jnp.linalg.eigvalsh(jnp.matmul(f.T, f, precision="highest"))[-1]
    rates = Rates(4 * n / largest, n / (4 * jnp.square(scores).sum(0).max()))
    return Probe(f.T @ onehot, jnp.full(text.shape[1], 250 * own.mean()), text), rates


def logits(probe: Probe, f: Any) -> Any:
    """f·W + α ⊙ (f·T) for features (examples, width)."""
    f = unit(jnp.asarray(f))
    return f @ probe.weights + probe.alpha[None] * (f @ probe.text)


def accuracy(probe: Probe, split: tuple[Any, Any]) -> float:
    """Accuracy on (features, labels)."""
    return float((np.asarray(logits(probe, split[0]).argmax(-1)) == np.asarray(split[1])).mean())


def train(f: Any, labels: Any, head: Any, *, epochs: int = EPOCHS) -> tuple[Probe, np.ndarray]:
    """The probe after `epochs` steps on all shots, and the loss before each; by one compiled program."""
    probe, rates = start(f, labels, head)
    found, losses = _train(probe, rates, unit(jnp.asarray(f)), jnp.asarray(labels), epochs=epochs)
    return jax.device_get(found), np.asarray(losses)


@functools.partial(jax.jit, static_argnames="epochs")
def _train(probe, rates, f, labels, *, epochs):
    def loss(probe):
        return optax.softmax_cross_entropy_with_integer_labels(logits(probe, f), labels).mean()

    def step(state, i):
        probe, speed = state
        value, slope = jax.value_and_grad(loss)(probe)
        speed = MOMENTUM * speed + slope.weights
        alpha = jnp.where((i + 1) % EVERY == 0, probe.alpha - rates.alpha * slope.alpha, probe.alpha)
        return (Probe(probe.weights - rates.weights * speed, alpha, probe.text), speed), value
    (probe, _), losses = jax.lax.scan(step, (probe, jnp.zeros_like(probe.weights)), jnp.arange(epochs))
    return probe, losses
