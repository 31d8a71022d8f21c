"""A toy encoder of two layers with two tasks of three classes, for tests of what learns on task vectors."""
import jax
import jax.numpy as jnp
import numpy as np

from tvjax import evaluation

WIDTH, CLASSES = 6, 3


def encode(params, x):
    layer = params["layers"]["0"]
    hidden = jnp.tanh(x.reshape(x.shape[0], -1).astype(jnp.float32) @ layer["fc1"]["weight"].T)
    norm = layer["layer_norm1"]
    return (hidden * norm["weight"][None] + norm["bias"][None]) @ layer["fc2"]["weight"].T


PREDICT = jax.jit(evaluation.classify(encode))
LINEAR = evaluation.classify_linearised(encode)


def theta0(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {"layers": {"0": {"fc1": {"weight": draw(7, 5)}, "fc2": {"weight": draw(WIDTH, 7)},
                             "layer_norm1": {"weight": jnp.ones(7), "bias": jnp.zeros(7)}}}}


def vector(seed, base):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.4 * rng.standard_normal(x.shape), jnp.float32), base)


def task(base, tau, seed, *, examples=48):
    """(head, split) of a task that θ0 + τ solves: three of its features, far apart, are the classes."""
    from tvjax import vectors
    theta, x = vectors.add(base, tau), np.random.default_rng(seed).standard_normal((examples, 5)).astype(np.float32)
    f = np.asarray(PREDICT(theta, jnp.eye(WIDTH), x))
    chosen = [0]
    while len(chosen) < CLASSES:
        chosen.append(int((f @ f[chosen].T).max(1).argmin()))
    head = jnp.asarray(5 * (f[chosen] - f.mean(0)).T)
    return head, (x, np.asarray(PREDICT(theta, head, x).argmax(-1), np.int32))
