"""Gram matrices of the inputs of linear layers, G = E[a aᵀ], which RegMean (arXiv:2212.09849) weighs task vectors by.

Any network whose linear layers are Flax modules with a matrix `weight` (out, in) is seen through
`flax.linen.intercept_methods`: only `apply(params, inputs)` is called. Batches stream through one compiled program, and
a Gram matrix is all that is kept of them.
"""
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tvjax import merging, sharding, tree, vectors

WEIGHT = "weight"


def collect(apply: Callable, params: Any, batches: Iterable[Any], *, names: Iterable[str] | None = None) -> dict:
    """{name of a weight: E[a aᵀ] over all inputs a of its layer, (in, in) in float32}.

    apply: (params, inputs) -> anything; give the same function each time. batches: of inputs, trees with examples
    first, of few different shapes (each compiles a program). names: the weights that are wanted, all by default; what
    lies behind the last of them is not computed.

    >>> class Net(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x @ self.param("weight", nn.initializers.ones, (2, 3)).T
    >>> apply = lambda params, x: Net().apply({"params": params}, x)
    >>> collect(apply, {"weight": jnp.ones((2, 3))}, [2 * jnp.eye(3)])["weight"].round(2).tolist()[0]
    [1.3300000429153442, 0.0, 0.0]
    """
    sums: dict[str, Any] = {}
    rows = 0
    (params,), layout = sharding.settled(params)
    names = None if names is None else tuple(names)
    for batch in batches:
        found = _sums(params, sharding.spread(batch, layout), apply=apply, names=names)
        if not found:
            raise ValueError("the network has no linear layer with a matrix `weight` (out, in) among those wanted")
        sums = _plus(sums, found) if sums else found
        rows += 1
    if not rows:
        raise ValueError("there are no batches to collect Gram matrices from")
    return {name: np.asarray(total / count) for name, (total, count) in sharding.host(sums).items()}


def stacked(apply: Callable, thetas: Mapping[str, Any], batches: Mapping[str, Any], *, names=None) -> dict:
    """{weight: (tasks, in, in)}, of each task's parameters on its own inputs: the data `gram` of `merging.regmean`."""
    found = [collect(apply, theta, batches[task], names=names) for task, theta in thetas.items()]
    return {name: np.stack([grams[name] for grams in found]) for name in found[0]}


def singular(gram: Mapping[str, Any]) -> list[str]:
    """The weights whose Gram matrices, summed over tasks, are singular in float32: some direction has no input.

    `merging.regmean` averages there, and its ridge, relative to the mean eigenvalue, pulls to the average elsewhere.

    >>> singular({"a": np.eye(2)[None], "b": np.ones((1, 2, 2))})
    ['b']
    """
    def is_singular(stack):
        values = np.linalg.eigvalsh(np.sum(stack, 0, dtype=np.float64))
        return values[0] <= np.finfo(np.float32).eps * len(values) * values[-1]
    return [name for name, stack in gram.items() if is_singular(stack)]


def linear_weights(apply: Callable, params: Any, inputs: Any) -> list[str]:
    """The weights that have a Gram matrix, in the order in which the network uses them; nothing is computed."""
    seen: dict[str, None] = {}

    def run(params, inputs):
        with nn.intercept_methods(functools.partial(_watch, note=lambda name, a: seen.setdefault(name))):
            return apply(params, inputs)
    jax.eval_shape(run, params, inputs)
    return list(seen)


def regmean_plus_plus(apply: Callable, theta0: Any, taus: Mapping[str, Any], batches: Mapping[str, Any], *,
                      off_diagonal=0.95, ridge=1e-6) -> Any:
    """The vector of RegMean++ (2025): Gram matrices of a block are collected behind the already merged lower blocks.

    Blocks are merged in the order in which the network runs them (a layer outside of blocks is its own); leaves without
    a Gram matrix are averaged beforehand. taus: {task: task vector}; batches: {task: its inputs}, lists; one pass over
    them for each block. off_diagonal, ridge: as in `merging.regmean`.
    """
    tasks = list(taus)
    merged = tree.flatten(merging.mean()([taus[task] for task in tasks]))
    flats = {task: tree.flatten(tau) for task, tau in taus.items()}
    inputs = batches[tasks[0]][0]
    done = [name for name in merged if name not in set(linear_weights(apply, theta0, inputs))]
    for names in _blocks([name for name in linear_weights(apply, theta0, inputs) if name in merged]):
        mixed = {task: {**flat, **{name: merged[name] for name in done}} for task, flat in flats.items()}
        thetas = {task: vectors.add(theta0, tree.unflatten(flat)) for task, flat in mixed.items()}
        gram = _of_block(apply, thetas, batches, names)
        own = [{name: flats[task][name] for name in names} for task in tasks]
        merged |= tree.flatten(merging.regmean(off_diagonal=off_diagonal, ridge=ridge)(own, gram=gram))
        done += names
    return tree.rebuild(taus[tasks[0]], merged)


def _of_block(apply, thetas, batches, names):
    """The stacked Gram matrices of a block, from the program of all blocks: one compilation, one task's at a time."""
    found = []
    for task, theta in thetas.items():
        grams = collect(apply, theta, batches[task])
        found.append({name: grams[name] for name in names})
    return {name: np.stack([one[name] for one in found]) for name in names}


def _blocks(names: list[str]) -> list[list[str]]:
    """Weights in order of execution, those of one block together."""
    found: dict[Any, list[str]] = {}
    for name in names:
        found.setdefault(tree.block(name) or name, []).append(name)
    return list(found.values())


def _watch(call, args, kwargs, context, *, note):
    """Calls the layer; tells `note` the inputs of one that has a matrix `weight` as wide as they are."""
    module = context.module
    if context.method_name == "__call__" and args and module.has_variable("params", WEIGHT):
        weight, a = module.get_variable("params", WEIGHT), args[0]
        fits = weight.ndim == 2 and jnp.ndim(a) > 1 and a.shape[-1] == weight.shape[1]
        if fits and jnp.issubdtype(a.dtype, jnp.floating):
            note(".".join((*module.path, WEIGHT)), a)
    return call(*args, **kwargs)


@functools.partial(jax.jit, static_argnames=("apply", "names"))
def _sums(params, batch, *, apply, names):
    """{weight: (Σ a aᵀ, how many a)} of one batch; a layer that is called more than once adds up."""
    found: dict[str, tuple] = {}

    def note(name, a):
        if names is not None and name not in names:
            return
        a = a.reshape(-1, a.shape[-1]).astype(jnp.float32)
        gram = jnp.einsum("ni,nj->ij", a, a, precision="highest")
        total, count = found.get(name, (0.0, 0))
        found[name] = (total + gram, count + jnp.float32(len(a)))
    with nn.intercept_methods(functools.partial(_watch, note=note)):
        apply(params, batch)
    return found


@jax.jit
def _plus(a, b):
    return jax.tree.map(jnp.add, a, b)
