"""Switching tasks inside `jit`: one shared vector, the packed masks of all tasks on the device, a traced task number.

θ_t = θ0 + γ_t · m_t ⊙ τ. The task number is an argument, so one compiled forward serves all tasks; bits are unpacked
within the sum, leaf by leaf, and no mask is kept. A switch costs a pass over θ0, τ and P/8 bytes, no copy from host.
"""
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tvjax import tree, vectors
from tvjax.compression import bits as packed


def params_for(theta0, tau, masks, task, factors=None):
    """The parameters of one task, in the structure and dtypes of θ0; leaves that `tau` lacks are θ0's own.

    masks: a tree of `Bits` stacked over tasks, (tasks, bytes) a leaf, as `tall_masks` and `Store.switch` give it.
    task: its number, traced or not; a number beyond the last means the last (inside `jit` nothing can be refused).
    factors: (tasks,) numbers γ, such as EMR's; 1 by default.

    >>> masks = packed.stack([{"w": packed.pack(jnp.array(row))} for row in ([True, False], [False, True])])
    >>> model = jax.jit(params_for)({"w": jnp.zeros(2)}, {"w": jnp.array([1.0, 2.0])}, masks, 1)
    >>> model["w"].tolist()
    [0.0, 2.0]
    """
    base, shared, rows = tree.flatten(theta0), tree.flatten(tau), packed.flatten(masks)
    packed.check_shapes(masks, {name: x.shape for name, x in shared.items()}, of="the shared vector's")
    by = None if factors is None else jnp.asarray(factors)[task]

    def moved(name, x):
        if name not in shared:
            return x
        step = packed.where_bits(rows[name][task], vectors.wide(shared[name]))
        step = step if by is None else step * by.astype(step.dtype)
        return (vectors.wide(x) + step).astype(x.dtype)
    return tree.rebuild(theta0, {name: moved(name, x) for name, x in base.items()})


def switched(apply: Callable) -> Callable:
    """forward(theta0, tau, masks, task, x, factors=None): `apply(params, x)` with the parameters of a traced task.

    Jitted once for all tasks.
    """
    @jax.jit
    def forward(theta0, tau, masks, task, x, factors=None):
        return apply(params_for(theta0, tau, masks, task, factors), x)
    return forward


def mixed(apply: Callable, theta0, tau, masks, tasks, x, factors=None, *, block: int = 8):
    """`apply(params of the example's task, example)` for a batch in which every example names its task; inside `jit`.

    tasks: (examples,) numbers. x: a tree of arrays, examples first. apply: (params, x) -> a tree of arrays, examples
    first, each example's result not depending on the others.

    Examples are sorted by task and cut into blocks of one task each, and a loop takes the blocks one by one. So one
    task's parameters exist at a time: memory P, not examples·P. There are at most T + (examples − T)/block blocks: a
    batch costs up to examples + (block − 1)·T forward passes of an example, and one switch a block. Small blocks waste
    fewer examples, large ones fewer switches; blocks that this batch does not need are passed over.

    >>> masks = packed.stack([{"w": packed.pack(jnp.array([i == 1]))} for i in range(2)])
    >>> run = lambda params, x: x * params["w"][None]
    >>> mixed(run, {"w": jnp.ones(1)}, {"w": jnp.ones(1)}, masks, jnp.array([1, 0]), jnp.array([[3.0], [3.0]])).tolist()
    [[6.0], [3.0]]
    """
    if block < 1:
        raise ValueError(f"a block has at least one example; got block={block}")
    tasks = jnp.clip(jnp.asarray(tasks).astype(jnp.int32), 0, packed.count_tasks(masks) - 1)
    places, owners, used = blocks(tasks, packed.count_tasks(masks), block=block)

    def run(rows, owner):
        params = params_for(theta0, tau, masks, owner, factors)
        return apply(params, jax.tree.map(lambda leaf: leaf[rows], x))

    def spare(rows, owner):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, rows, owner))
    one = lambda _, part: (None, jax.lax.cond(part[2], run, spare, part[0], part[1]))
    _, out = jax.lax.scan(one, None, (places, owners, used))
    return jax.tree.map(lambda leaf: _back(leaf, places, tasks.shape[0]), out)


def blocks(tasks, count: int, *, block: int):
    """(places, owners, used): the examples of every block, (blocks, block), its task and whether it is one, (blocks,).

    A block that is not full repeats its task's last example. There are as many blocks as any batch may need; of this
    batch's, those at the end are spare, hold the number of examples for a place, and need no work.
    """
    examples = tasks.shape[0]
    sizes = jnp.zeros((count,), jnp.int32).at[tasks].add(1)
    needed = -(-sizes // block)
    ends = jnp.cumsum(needed)
    most = min(count, examples) + max(examples - min(count, examples), 0) // block
    number = jnp.arange(most, dtype=jnp.int32)
    owners = jnp.minimum(jnp.searchsorted(ends, number, side="right"), tasks.max()).astype(jnp.int32)
    order, starts = jnp.argsort(tasks, stable=True), jnp.cumsum(sizes) - sizes
    within = (number - (ends - needed)[owners]) * block
    rank = within[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    rank = jnp.clip(rank, 0, (sizes[owners] - 1)[:, None])
    used = number < ends[-1]
    return jnp.where(used[:, None], order[starts[owners][:, None] + rank], examples), owners, used


def _back(leaf, places, examples: int):
    """Results (blocks, block, …) in the order of the examples; repeated ones are equal, so any of them will do."""
    flat = leaf.reshape(-1, *leaf.shape[2:])
    return jnp.zeros((examples, *flat.shape[1:]), flat.dtype).at[places.reshape(-1)].set(flat, mode="drop")


def per_example(apply: Callable, theta0, tau, masks, tasks, x, factors=None):
    """What `mixed` gives, by `vmap` over the examples: every example has parameters of its own, examples·P numbers at
    once and no shared matrix product. For small models and batches of few examples."""
    def one(task, example):
        params = params_for(theta0, tau, masks, task, factors)
        out = apply(params, jax.tree.map(lambda leaf: leaf[None], example))
        return jax.tree.map(lambda leaf: leaf[0], out)
    return jax.vmap(one)(jnp.asarray(tasks), x)


def device_bytes(theta0: Any, tau: Any, masks: Any) -> dict[str, int]:
    """What lies on the device to serve all tasks, against that many whole models: {"switch", "models"}, in bytes."""
    count = packed.count_tasks(masks)
    whole = lambda part: sum(leaf.nbytes for leaf in jax.tree.leaves(part))
    return {"switch": whole(theta0) + whole(tau) + whole(masks), "models": count * whole(theta0)}
