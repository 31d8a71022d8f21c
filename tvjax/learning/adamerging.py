"""AdaMerging (Yang et al., 2024, arXiv:2310.02575): coefficients that make predictions on unlabelled inputs certain.

min over λ in [0, 1] of Σ_t H(softmax f(x_t; θ0 + Σ_i λ_i τ_i)), one λ a task vector (`by="task"`) or one a tensor of it
(`by="tensor"`, the paper's layer-wise form). On vectors after `top(density=0.2) | agree()` it is AdaMerging++.

A step merges once, runs the tasks one after the other and adds up the gradient of θ, which one pass over the pool turns
into that of λ. So memory holds θ0, the merged model, two gradients, one task's activations, and the pool as it is
stored (bfloat16: half a model a task).
"""
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tvjax import sharding
from tvjax.learning.coefficients import Scheme, compose, init
from tvjax.learning.pool import Pool, size

OUT = -1e9  # the logit of a column that is no class of the task
Coefficients = dict[str, Any]  # on the host


class Adapted(NamedTuple):
    """`coefficients` within [0, 1]; `losses` of all steps; `trace` [(step, coefficients)], the last step's included."""

    coefficients: Coefficients
    losses: np.ndarray
    trace: list[tuple[int, Coefficients]]


def adapt(predict: Callable, theta0: Any, held: Pool, tasks: Mapping[str, tuple[Any, Any]], *, by: str = "tensor",
          steps: int = 500, lr: float = 1e-3, batch: int = 16, batches: int = 2, value: float = 0.3, seed: int = 0,
          every: int = 10, say: Callable[[int, float], None] | None = None) -> Adapted:
    """The coefficients after `steps` of Adam on the entropy, from `value`; clamped to [0, 1] where they are applied.

    predict: (params, head, inputs) -> logits. held: the task vectors (`learning.pool`). tasks: {task: (head, unlabelled
    inputs, a tree with examples first)}: those that are adapted to. by: "task" or "tensor". batch, batches: each step
    takes `batches` times `batch` different inputs of every task. The defaults are those of the authors' code, whose
    inputs are the test images; on a mesh (θ0's, or that of `sharding.on`) every batch is cut over it. every: how
    often the coefficients are kept. say: told (step, loss).
    """
    state = start(held, by=by, value=value, lr=lr)
    (theta0, held, state), layout = sharding.settled(theta0, held, state)
    kept = None if layout is None else tuple(x.sharding for x in jax.tree.leaves(state))
    stepper = adapter(predict, Scheme(by=by), lr, kept)
    groups = _grouped(tasks)
    heads = [(jnp.stack([_padded(tasks[task][0], width) for task in names for _ in range(batches)]),
              jnp.array([tasks[task][0].shape[1] for task in names for _ in range(batches)], jnp.int32))
             for names, width in groups]
    losses, trace = [], [(0, jax.device_get(clamped(state[0])))]
    for step in range(steps):
        inputs = [sharding.spread(_inputs(tasks, names, batch, batches, seed, step), layout, axis=1)
                  for names, _ in groups]
        state, loss = stepper(state, theta0, held, heads, inputs)
        losses.append(loss)
        if (step + 1) % every == 0 or step + 1 == steps:
            trace.append((step + 1, jax.device_get(clamped(state[0]))))
            if say:
                say(step + 1, float(loss))
    return Adapted(trace[-1][1], np.asarray(jax.device_get(losses), np.float32), trace)


def start(held: Pool, *, by: str = "tensor", value: float = 0.3, lr: float = 1e-3):
    """(coefficients, Adam's state) before the first step of an `adapter`."""
    coefficients = init(held, Scheme(by=by), value=value)
    return coefficients, optax.adam(lr).init(coefficients)


@functools.cache
def adapter(predict: Callable, scheme: Scheme, lr: float, kept: tuple | None = None) -> Callable:
    """The compiled step (state, θ0, pool, heads, inputs) -> (state, loss); the state's buffers are donated.

    kept: the shardings of the state's leaves on a mesh, which they keep.

    heads: for each group of tasks (padded heads, their numbers of classes), inputs: as many groups, (runs, batch, …).
    """
    def loss(theta, run):
        (head, classes), inputs = run
        logits = predict(theta, head, inputs).astype(jnp.float32)
        known = jnp.arange(logits.shape[-1])[None] < classes
        return entropy(jnp.where(known, logits, OUT)).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, theta0, held, heads, inputs):
        coefficients, moments = state
        theta, back = jax.vjp(lambda c: compose(theta0, held, clamped(c), scheme), coefficients)

        def add(total, run):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(theta, run)), None
        total = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, theta))
        for runs in zip(heads, inputs, strict=True):
            total, _ = jax.lax.scan(add, total, runs)
        (slope,) = back(total[1])
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            change, moments = optax.adam(lr).update(slope, moments)
        return sharding.constrain((optax.apply_updates(coefficients, change), moments), kept), total[0]
    return step


def clamped(coefficients: Coefficients) -> Coefficients:
    """λ within [0, 1]; outside, its gradient is zero, as in the authors' code."""
    return jax.tree.map(lambda c: jnp.clip(c, 0, 1), coefficients)


def entropy(logits):
    """−Σ p log p of softmax(logits) over the last axis, in nats; a class at −1e9 adds nothing."""
    log_p = jax.nn.log_softmax(logits)
    return -(jnp.exp(log_p) * log_p).sum(-1)


def merged(theta0: Any, held: Pool, coefficients: Coefficients) -> Any:
    """θ0 + Σ λ τ, on the host."""
    by = "task" if set(coefficients) == {"task"} else "tensor"
    return jax.device_get(_merged(theta0, held, coefficients, scheme=Scheme(by=by)))


@functools.partial(jax.jit, static_argnames="scheme")
def _merged(theta0, held, coefficients, *, scheme):
    return compose(theta0, held, clamped(coefficients), scheme)


def by_task(coefficients: Coefficients, held: Pool) -> dict[str, np.ndarray]:
    """{tensor: (vectors,)} of either form, for traces and box plots."""
    if set(coefficients) == {"task"}:
        return {name: np.asarray(coefficients["task"]) for name in held}
    return {name: np.asarray(c) for name, c in coefficients.items()}


def _padded(head, width: int):
    return jnp.pad(jnp.asarray(head), ((0, 0), (0, width - head.shape[1])))


def _grouped(tasks) -> list[tuple[list[str], int]]:
    """Tasks whose inputs have one shape, with the width to which their heads are padded: they share one scan."""
    if not tasks:
        raise ValueError("there is no task to adapt to")
    found: dict[Any, list[str]] = {}
    for task, (_, inputs) in tasks.items():
        shapes = tuple((np.shape(x)[1:], np.asarray(x[:1]).dtype.name) for x in jax.tree.leaves(inputs))
        found.setdefault(shapes, []).append(task)
    return [(names, max(tasks[task][0].shape[1] for task in names)) for names in found.values()]


def _inputs(tasks, names, batch: int, batches: int, seed: int, step: int):
    """(tasks · batches, batch, …) different inputs of each task: a function of seed, step and the task's name."""
    def one(task):
        inputs = tasks[task][1]
        have = len(jax.tree.leaves(inputs)[0])
        if have < batch * batches:
            raise ValueError(f"a step takes {batch * batches} inputs of each task ({batches} batches of {batch}); "
                             f"{task} has {have}")
        rng = np.random.default_rng([seed, step, zlib.crc32(task.encode())])
        chosen = rng.choice(have, batch * batches, replace=False).reshape(batches, batch)
        return jax.tree.map(lambda x: np.asarray(x)[chosen], inputs)
    return jax.tree.map(lambda *parts: np.concatenate(parts), *map(one, names))


def vectors_of(held: Pool) -> int:
    """How many task vectors the coefficients weigh."""
    return size(held)
