"""Representation Surgery (Yang et al., 2024, arXiv:2402.02705): a small module a task corrects the merged features.

z' = z − B·ReLU(A z), A (rank, features), B (features, rank), trained so that z' is near to the fine-tuned model's
features of the same unlabelled inputs: mean |z' − z_t|. Features are computed once; both models stay as they are.
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

Repair = dict[str, Any]


def repaired(repair: Repair, features):
    """z − B·ReLU(A z) for rows z.

    >>> repaired({"A": jnp.eye(2), "B": jnp.eye(2)}, jnp.array([[2.0, -1.0]])).tolist()
    [[0.0, -1.0]]
    """
    return features - jax.nn.relu(features @ repair["A"].T) @ repair["B"].T


def train(features, targets, *, rank: int = 16, steps: int = 1000, lr: float = 1e-3, batch: int = 16,
          seed: int = 0) -> tuple[Repair, Any]:
    """(the module, the losses of all steps): Adam on mean |z' − z_t| from B = 0, which is the merged model itself.

    features: (examples, d) of the merged model; targets: (examples, d) of the model fine-tuned on the task.
    """
    features, targets = (jnp.asarray(x, jnp.float32) for x in (features, targets))
    if features.shape != targets.shape or features.ndim != 2:
        raise ValueError("features and targets are rows for the same inputs; "
                         f"got shapes {features.shape} and {targets.shape}")
    if rank < 1:
        raise ValueError(f"rank is at least 1; got {rank}")
    key, width = jax.random.key(seed), features.shape[1]
    start = {"A": jax.random.uniform(key, (rank, width), minval=-1, maxval=1) / width**0.5,
             "B": jnp.zeros((width, rank))}
    return _train(start, features, targets, key, jnp.float32(lr), steps=steps, batch=min(batch, len(features)))


@functools.partial(jax.jit, static_argnames=("steps", "batch"))
def _train(repair, features, targets, key, lr, *, steps, batch):
    optimizer = optax.adam(lr)

    def loss(repair, chosen):
        return jnp.abs(repaired(repair, features[chosen]) - targets[chosen]).mean()

    def step(state, i):
        repair, moments = state
        chosen = jax.random.randint(jax.random.fold_in(key, i), (batch,), 0, len(features))
        value, slope = jax.value_and_grad(loss)(repair, chosen)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            change, moments = optimizer.update(slope, moments)
        return (optax.apply_updates(repair, change), moments), value
    (repair, _), losses = jax.lax.scan(step, (repair, optimizer.init(repair)), jnp.arange(1, steps + 1))
    return repair, losses
