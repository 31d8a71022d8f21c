"""The engine for `jit`, `vmap`, `grad`, accelerators and meshes: the operator as one program over the whole tree.

Leaves of equal shape pass whole-leaf stages together (one `vmap`), so that a transformer needs a handful of spectral
programs; on a mesh they are dealt out, so that a device has whole matrices and none is decomposed in parts. Order
statistics count over float bits: no sort, no flattening, any sharding, traced shares.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tvjax.merging import plan
from tvjax.merging.operator import Operator
from tvjax.merging.statistics import Greatest, Kth, Least, Sum, group
from tvjax.tree import wide


def run(operator: Operator, stacks: Mapping, tasks, data: Mapping, mesh: Mesh | None = None):
    """{name: stack} -> {name: result}; tasks (tasks,) hashes of the tasks' names, data {name of the tree: {leaf:
    array}}, mesh that on which the stacks lie, if they lie on one.
    """
    known = plan.leaves({name: stack.shape[1:] for name, stack in stacks.items()})
    dtypes = {name: getattr(stack.dtype, "factors", stack.dtype) for name, stack in stacks.items()}
    origin = {name: jax.tree.map(lambda part: part.astype(wide(part.dtype)), stack) for name, stack in stacks.items()}
    xs = dict(origin)
    for stage in operator.stages:
        here = [leaf for leaf in known.values() if stage.holds(leaf.name, leaf.shape)]
        values = [measure(stat, here, xs) for stat in stage.stats]
        for bucket in buckets(stage, here, xs, values):
            xs |= through(stage, bucket, xs, values, origin, tasks, data, mesh)
    return {name: jax.tree.map(lambda leaf, dtype=dtypes[name]: leaf.astype(dtype), x) for name, x in xs.items()}


def buckets(stage, members, xs, values):
    """Leaves that pass a stage together: all of one structure for whole-leaf stages, each alone for entry-wise ones."""
    if stage.entrywise:
        return [[leaf] for leaf in members]
    found: dict = {}
    for leaf in members:
        local = (
            xs[leaf.name],
            plan.localise(stage, leaf),
            [v[group(s.scope, leaf.name)] for s, v in zip(stage.stats, values, strict=True)],
        )
        key = (jax.tree.structure(local), tuple(jnp.shape(part) for part in jax.tree.leaves(local)), leaf.shape)
        found.setdefault(key, []).append(leaf)
    return list(found.values())


def through(stage, bucket, xs, values, origin, tasks, data, mesh=None):
    def one(leaf):
        mine = tuple(v[group(s.scope, leaf.name)] for s, v in zip(stage.stats, values, strict=True))
        fed = {need: plan.datum(data, need, leaf.name) for need in stage.needs if need in data}
        return (
            plan.localise(stage, leaf),
            mine,
            xs[leaf.name],
            origin[leaf.name],
            fed,
            np.float32(leaf.depth),
            plan.hashed(leaf.name),
        )

    def go(local, mine, x, start, fed, depth, name):
        return plan.apply(local, mine, x, plan.Place(name, tasks, 0, depth), start, fed)

    if len(bucket) == 1:
        return {bucket[0].name: go(*one(bucket[0]))}
    together = jax.tree.map(lambda *parts: jnp.stack([jnp.asarray(part) for part in parts]), *map(one, bucket))
    results = jax.vmap(go)(*together) if mesh is None else _dealt_out(go, together, len(bucket), mesh)
    return {leaf.name: jax.tree.map(lambda part, i=i: part[i], results) for i, leaf in enumerate(bucket)}


def _dealt_out(go, together, count: int, mesh: Mesh):
    """`go` of `count` leaves, ⌈count/devices⌉ on each device; the last are repeated where they do not fill all."""
    short = -count % mesh.size
    fill = lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], short, 0)]) if short else x
    each = P(tuple(mesh.axis_names))
    spread = jax.shard_map(jax.vmap(go), mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    return jax.tree.map(lambda x: x[:count], spread(*jax.tree.map(fill, together)))


def measure(stat, members, xs):
    """The values of a statistic by group."""
    return {name: _value(stat, leaves, xs) for name, leaves in plan.groups(stat.scope, members).items()}


def _value(stat, members, xs):
    if isinstance(stat, Sum):
        return jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *[stat.f(xs[leaf.name]) for leaf in members])
    scores = [rows(stat.score(xs[leaf.name])) for leaf in members]
    if isinstance(stat, Greatest):
        return jnp.stack([s.max(1) for s in scores]).max(0)
    if isinstance(stat, Least):
        return jnp.stack([s.min(1) for s in scores]).min(0)
    assert isinstance(stat, Kth)
    share = plan.share_of(stat.share, members, stat.scope)
    return kth_largest(scores, rank(share, sum(s.shape[1] for s in scores), stat.extra))


def rows(x):
    return x.reshape(x.shape[0], -1)


def rank(share, entries: int, extra: int = 0):
    """k = ⌊share · entries⌋ + extra within 1 … entries; exact for Python numbers, in float32 for traced ones."""
    if isinstance(share, jax.Array):
        return jnp.clip(jnp.asarray(share * entries, jnp.int32) + extra, 1, entries)
    share = np.asarray(share, np.float64)
    return np.clip(np.int64(np.floor(share * entries)) + extra, 1, entries)


def kth_largest(scores, k):
    """Per task, the k-th largest of the entries of `scores`, a list of (tasks, entries) arrays; exact, any k, scalar
    or (tasks,).

    The answer is built bit by bit, since floats order as their (sign-adjusted) bit patterns do: one counting pass for
    each bit.
    """
    width = scores[0].dtype.itemsize * 8
    whole = jnp.int32 if width == 32 else jnp.int64
    keys = [_ordered(s, whole) for s in scores]
    counts = jnp.broadcast_to(jnp.asarray(k, whole), (scores[0].shape[0],))
    lowest = jnp.full_like(counts, jnp.iinfo(whole).min)
    positive = sum(jnp.sum(key >= 0, 1, dtype=whole) for key in keys) >= counts

    def grow(i, low):
        high = low + (jnp.ones((), whole) << (width - 2 - i).astype(whole))
        enough = sum(jnp.sum(key >= high[:, None], 1, dtype=whole) for key in keys) >= counts
        return jnp.where(enough, high, low)

    found = jax.lax.fori_loop(0, width - 1, grow, jnp.where(positive, 0, lowest))
    return _unordered(found, scores[0].dtype)


def _ordered(x, whole):
    """Integers that order as the floats do (−0 just below 0)."""
    bits = jax.lax.bitcast_convert_type(x, whole)
    return jnp.where(bits < 0, _flip(bits, whole), bits)


def _flip(bits, whole):
    return bits ^ jnp.iinfo(whole).max


def _unordered(bits, dtype):
    whole = bits.dtype
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, _flip(bits, whole), bits), dtype)
