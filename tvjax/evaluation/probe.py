"""The linear probe: multinomial logistic regression on the frozen features of an encoder, the cheap rival of tuning.

min_W,b mean(−log softmax(W·unit(f(x)) + b)[label]) + decay·‖W‖², the decay chosen on validation data.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import sharding
from tvjax.evaluation.top1 import padded

DECAYS = (1e-5, 1e-4, 1e-3, 1e-2)


def features(encode, params, inputs, *, batch=128):
    """encode(params, inputs) of all inputs in float32, (examples, features), by one compiled program.

    >>> features(lambda params, inputs: inputs @ params, jnp.eye(2), np.ones((3, 2), np.float32), batch=2).shape
    (3, 2)
    """
    (params,), layout = sharding.settled(params)
    parts = [_features(params, sharding.spread(part, layout), encode=encode)[:real]
             for part, real in padded(inputs, batch=batch)]
    return np.concatenate(sharding.host(parts)).astype(np.float32)


@functools.partial(jax.jit, static_argnames="encode")
def _features(params, inputs, *, encode):
    return encode(params, inputs)


def linear_probe(train, val, test, *, classes: int, decays=DECAYS, steps: int = 100) -> float:
    """Test accuracy of the probe fitted on `train`; the first decay that is best on `val` is taken.

    train, val, test: pairs (features (examples, width), labels); features are scaled to unit length first.

    >>> x, y = np.eye(2, dtype=np.float32)[[0, 1, 0, 1]], np.array([0, 1, 0, 1])
    >>> linear_probe((x, y), (x, y), (x, y), classes=2, steps=5)
    1.0
    """
    best = _best(train, val, classes=classes, decays=decays, steps=steps)
    return _right(best, *_prepared(test))


def probe_head(train, val, *, classes: int, decays=DECAYS, steps: int = 100):
    """The head (features, classes) of such a probe without its bias, for unit features; decays as in `linear_probe`.

    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> (probe_head((x, y), (x, y), classes=2, steps=5).argmax(1) == y).all().item()
    True
    """
    return _best(train, val, classes=classes, decays=decays, steps=steps, bias=False)["weight"]


def _best(train, val, *, classes, decays, steps, bias=True):
    """The weights and bias fitted on `train` with the first decay that is best on `val`."""
    (x, y), judged = _prepared(train), _prepared(val)
    fitted = [_fit(x, jnp.asarray(y), jnp.float32(decay), classes=classes, steps=steps, bias=bias) for decay in decays]
    return max(fitted, key=lambda w: _right(w, *judged))


def _prepared(split):
    """(unit features, labels)."""
    return _unit(split[0]), np.asarray(split[1])


def _right(w, x, y) -> float:
    return float((np.asarray(_scores(w, x)).argmax(1) == y).mean())


def _unit(x):
    x = np.asarray(x, np.float32)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def _scores(w, x):
    return x @ w["weight"] + w["bias"][None]


@functools.partial(jax.jit, static_argnames=("classes", "steps", "bias"))
def _fit(x, y, decay, *, classes, steps, bias=True):
    """L-BFGS on the whole set."""
    def loss(w):
        w = w if bias else {**w, "bias": jnp.zeros_like(w["bias"])}
        return optax.softmax_cross_entropy_with_integer_labels(_scores(w, x), y).mean() + decay * (w["weight"]**2).sum()

    solver, start = optax.lbfgs(), {"weight": jnp.zeros((x.shape[1], classes)), "bias": jnp.zeros(classes)}
    both = optax.value_and_grad_from_state(loss)

    def step(carry, _):
        w, state = carry
        value, grad = both(w, state=state)
        with jax.numpy_dtype_promotion("standard"):  # optax 0.2.8 mixes integer counts with floats
            updates, state = solver.update(grad, state, w, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(w, updates), state), None
    (w, _), _ = jax.lax.scan(step, (start, solver.init(start)), length=steps)
    return w
