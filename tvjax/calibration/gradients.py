"""Per-example gradients, reduced over a data set without ever holding more of them than a budget of memory allows.

mean_n r(∇_θ f(θ; x_n)) with r the absolute value, the square or nothing: not what the gradient of a mean gives. The
examples pass through `vmap(grad(f))` in chunks whose gradients fit the budget, and each chunk is added to one sum.
"""
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import sharding, tree

BUDGET = 1 << 30  # bytes of per-example gradients held at once, on each device
MOST = 128  # examples of a chunk, however small the model: their activations are in memory too
GROUPS = 8  # sums of their own, added in a fixed order: so many devices can share the work without changing a bit

# What is summed of each gradient, and what is done to the mean.
REDUCTIONS: dict[str, tuple[Callable, Callable]] = {
    "mean_abs": (jnp.abs, lambda x: x),
    "mean_square": (jnp.square, lambda x: x),
    "mean": (lambda x: x, lambda x: x),
    "abs_mean": (lambda x: x, jnp.abs),
}


def per_example(f: Callable, params: Any, examples: Any, *shared) -> Any:
    """The gradient of f(params, example, *shared) by `params` for every example: leaves (examples, …).

    f: gives one number for one example. examples: a tree of arrays with examples first; `shared` is the same for all.

    >>> per_example(lambda w, x: w * x**2, jnp.array(1.0), jnp.array([1.0, 2.0])).tolist()
    [1.0, 4.0]
    """
    one = lambda params, example: f(params, example, *shared)
    return jax.vmap(jax.grad(one), (None, 0))(params, examples)


def reduced(f: Callable, params: Any, examples: Any, *shared, reduce: str, budget: int = BUDGET,
            chunk: int | None = None, devices: Sequence[Any] | None = None) -> Any:
    """A tree like `params`, in float32 at least: the reduction of the gradients of f over all examples.

    f: (params, example, *shared) -> a scalar. Programs are kept under this function: give the same object each time.
    params: what the gradient is taken by; whatever is not moved belongs to `shared`, and costs no gradient.
    examples: a tree of arrays with examples first, on the host or a device.
    reduce: "mean_abs" (mean of |∇|), "mean_square" (mean of ∇²), "mean" (mean of ∇), "abs_mean" (|mean of ∇|).
    budget: bytes of gradients that a device holds at once; a chunk has as many examples as fit (`MOST` at most), or
      `chunk` where that is fewer.
    devices: those that share the work: by default those of the mesh on which `params` lie or of `sharding.on`, of all
      its processes, else all local ones. Their number does not change a bit of the result.

    Raises:
      ValueError: where there are no examples, the budget holds no single gradient, or a sum is not finite (the
        tensors are named).

    >>> f = lambda w, x: w * x
    >>> x = jnp.array([1.0, -2.0])
    >>> [float(reduced(f, jnp.array(1.0), x, reduce=how)) for how in ("mean_abs", "mean_square", "abs_mean")]
    [1.5, 2.5, 0.5]
    """
    if reduce not in REDUCTIONS:
        raise ValueError(f"no reduction {reduce!r}; {tree.did_you_mean(str(reduce), list(REDUCTIONS))}")
    count, finish = count_examples(examples), REDUCTIONS[reduce][1]
    params, shared, devices = _sharers(params, shared, devices)
    rows = chunk_size(params, budget=budget, most=min(MOST, -(-count // GROUPS), MOST if chunk is None else chunk))
    here = [device for device in devices if device.process_index == jax.process_index()]
    held = [jax.device_put((params, shared), device) for device in here]
    groups = np.array_split(np.arange(count), min(GROUPS, count))
    total = None
    for first in range(0, len(groups), len(devices)):  # as many groups as there are devices, in step
        turn = list(zip(groups[first:first + len(devices)], devices, strict=False))
        mine = iter(_sums([group for group, device in turn if device in here], examples, held, rows, f, reduce))
        for _, device in turn:
            found = jax.device_put(next(mine), here[0]) if device in here else None
            if len(here) < len(devices):
                found = sharding.sent(found, device.process_index, like=_zeros(params))
            total = found if total is None else _plus(total, found)
    mean = jax.tree.map(lambda x: finish(x / count), total)
    check_finite(mean)
    return mean


def _sharers(params, shared, devices):
    """(parameters and what goes with them where each process can read them, the devices that share the work)."""
    if devices is not None:
        return params, shared, list(devices)
    layout = sharding.found(params)
    if layout is None:
        return params, shared, jax.local_devices()
    return *sharding.host((params, shared)), list(layout.mesh.devices.flat)


def _sums(groups, examples, held, rows, f, reduce):
    """The sum over each group of examples, one group a device; devices work at the same time."""
    sums = [_zeros(params) for _, (params, _) in zip(groups, held, strict=False)]
    for start in range(0, max(map(len, groups)), rows):
        for place, (group, (params, shared)) in enumerate(zip(groups, held, strict=False)):
            chosen = group[start:start + rows]
            if len(chosen):
                part = jax.device_put(_filled(examples, chosen, rows), jax.tree.leaves(params)[0].device)
                sums[place] = _add(sums[place], params, part, np.int32(len(chosen)), shared, f=f, reduce=reduce)
    return sums


def chunk_size(params: Any, *, budget: int = BUDGET, most: int = MOST) -> int:
    """How many examples' gradients fit into `budget` bytes, `most` at most; a ValueError where not one does.

    >>> chunk_size({"w": np.zeros(1000, np.float32)}, budget=10_000)
    2
    """
    each = sum(int(np.size(x)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(params))
    if not each:
        raise ValueError("there is no parameter to take a gradient by")
    if budget < each:
        raise ValueError(f"a budget of {budget:,} bytes does not hold the gradient of one example, {each:,} bytes: "
                         "raise the budget or take the gradient by fewer tensors")
    if most < 1:
        raise ValueError(f"a chunk has at least one example; got chunk={most}")
    return min(budget // each, most)


def count_examples(examples: Any) -> int:
    """The common number of examples of a tree of arrays; a ValueError where there are none or they disagree."""
    sizes = {np.shape(x)[0] if np.ndim(x) else 0 for x in jax.tree.leaves(examples)}
    if not sizes or sizes == {0}:
        raise ValueError("there are no examples to calibrate on")
    if len(sizes) != 1:
        raise ValueError(f"arrays of examples have one common length; here are {', '.join(map(str, sorted(sizes)))}")
    return sizes.pop()


def check_finite(scores: Any) -> None:
    """Raises ValueError naming the tensors of a tree that hold NaN or infinity."""
    flat = tree.flatten(scores)
    fine = jax.device_get(_finite(flat))
    if bad := [name or "the parameter" for name in flat if not fine[name]]:
        raise ValueError(f"the gradient is not finite in {tree.listing(bad)}: look for bad values in the examples or "
                         "in the weights")


@jax.jit
def _finite(flat):
    return {name: jnp.isfinite(x).all() for name, x in flat.items()}


def _filled(examples, chosen, rows):
    """The chosen examples, the first of them repeated up to `rows`, so that all chunks share one program."""
    take = np.append(chosen, np.full(rows - len(chosen), chosen[0]))
    return jax.tree.map(lambda x: x[take], examples)


@jax.jit
def _zeros(params):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, tree.wide(x.dtype)), params)


@functools.partial(jax.jit, static_argnames=("f", "reduce"), donate_argnames="total")
def _add(total, params, part, real, shared, *, f, reduce):
    """`total` plus the reduction of the first `real` examples' gradients; leaf by leaf the gradients are let go."""
    grads = per_example(f, params, part, *shared)
    one = REDUCTIONS[reduce][0]

    def add(total, grad):  # one example after the other: XLA's reduction over a first axis is very slow on CPUs
        return jax.lax.fori_loop(0, real, lambda i, sum_: sum_ + one(grad[i].astype(sum_.dtype)), total)
    return jax.tree.map(add, total, grads)


@functools.partial(jax.jit, donate_argnums=0)
def _plus(a, b):
    return jax.tree.map(jnp.add, a, b)
