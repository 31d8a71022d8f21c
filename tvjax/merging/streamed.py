"""The engine for concrete trees and files: two kinds of passes over pieces of leaves, so that memory is bounded by a
piece and not by the model.

A pass for each stage that declares statistics, then one that applies the leaf functions. Leaves whose stages are all
entry-wise go in chunks of fixed sizes (a few programs serve every model), others whole. Chunk boundaries and order are
the same wherever the entries come from: results from memory and from disk are equal bit by bit.
"""
import contextlib
import dataclasses
import functools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import threadpoolctl

from tvjax.merging import numbers, plan
from tvjax.merging.numbers import sum_tasks
from tvjax.merging.operator import Operator
from tvjax.merging.sources import Source
from tvjax.merging.statistics import group

AHEAD = 3  # pieces that are read and started ahead of their use
WHOLE = 5 << 20  # entries of a task in whole leaves that are under way at once
SIZES = (1 << 10, 1 << 13, 1 << 16)  # multiples of draws.BLOCK; eight tasks' float32 fill a few MB, which caches hold


class Piece(NamedTuple):
    """A part of a leaf: entries start:stop flattened and padded to a fixed size, or the whole leaf."""

    leaf: plan.Leaf
    start: int
    stop: int
    whole: bool


class Run(NamedTuple):
    """What one call of an operator holds on to."""

    operator: Operator
    source: Source
    tasks: np.ndarray
    data: Mapping[str, Mapping[str, Any]]
    leaves: Mapping[str, plan.Leaf]
    values: dict  # (stage, statistic) -> {group: value}
    kept: dict  # leaf -> (stages done, state), for leaves that cost too much to take through twice
    check: Callable  # (whether all entries of a piece are finite, its leaf) -> None, or raises


class Made(NamedTuple):
    """A finished piece: entries start:stop of the flattened leaf (after any leading axes of tasks), or the whole leaf.

    origin: what was read, (tasks, entries) and perhaps zeros behind them, or the whole leaf of all tasks.
    """

    leaf: plan.Leaf
    start: int
    stop: int
    result: Any
    origin: Any


def run(operator: Operator, source: Source, tasks, data: Mapping) -> Iterator[tuple[str, Any]]:
    """Yields (name, result) leaf by leaf, each in its input dtype.

    Raises ValueError naming the first leaf with NaN or infinite entries.
    """
    held: list[Made] = []
    for made in finished(prepare(operator, source, tasks, data)):
        held.append(made)
        if made.stop == math.prod(made.leaf.shape):
            yield made.leaf.name, _joined(held, source.dtypes[made.leaf.name])
            held = []


def refuse(finite, leaf: plan.Leaf) -> None:
    """The usual check of entries: NaN and infinities end the merge."""
    if not finite:
        raise ValueError(f"{leaf.name} holds NaN or infinite entries; a merge would spread them")


def prepare(operator: Operator, source: Source, tasks, data: Mapping, check: Callable = refuse) -> Run:
    """Computes all statistics that the operator declares: a pass over the entries for each, or for two (`counting`)."""
    from tvjax.merging import folding  # which builds on this module

    job = Run(operator, source, tasks, data, plan.leaves(source.shapes), {}, {}, check)
    for i, stage in enumerate(operator.stages):
        for j, stat in enumerate(stage.stats):
            here = [leaf for leaf in job.leaves.values() if stage.holds(leaf.name, leaf.shape)]
            if (i, j) not in job.values:  # not taken along by an earlier one
                folding.values(job, i, j, plan.groups(stat.scope, here))
    return job


def finished(job: Run, names=None) -> Iterator[Made]:
    """The last pass: results piece by piece in order, in float32 or wider, for all leaves or those in `names`."""
    leaves = job.leaves.values() if names is None else [job.leaves[name] for name in names]
    started = ((piece, origin, _through(*_inputs(job, piece, way, origin)))
               for piece, way, origin in _origins(job, leaves, len(job.operator.stages)))
    with _threads(job):
        for piece, origin, (x, finite) in _ahead(started):
            job.check(finite, piece.leaf)
            if piece.whole:
                yield Made(piece.leaf, 0, piece.stop, jax.tree.map(np.asarray, x), origin)
            else:
                yield Made(piece.leaf, piece.start, piece.stop, np.asarray(x)[..., : piece.stop - piece.start], origin)


def _threads(job: Run):
    """Where many small leaves run side by side, each decomposition gets one thread: BLAS's own would stand in each
    other's way."""
    whole = [math.prod(leaf.shape) for leaf in job.leaves.values() if len(leaf.shape) > 1 and not _chunked(job, leaf)]
    several = len(whole) >= (os.cpu_count() or 1) > 1 and 2 * max(whole) <= WHOLE
    return threadpoolctl.threadpool_limits(1, user_api="blas") if several else contextlib.nullcontext()


def _joined(parts: list[Made], dtype):
    leaf, first = parts[0].leaf, parts[0].result
    dtype = getattr(dtype, "factors", dtype)
    if len(parts) == 1 and (not isinstance(first, np.ndarray) or first.shape[-len(leaf.shape) :] == leaf.shape):
        return jax.tree.map(lambda part: part.astype(dtype, copy=False), first)
    out = np.empty((*first.shape[:-1], math.prod(leaf.shape)), dtype)
    for part in parts:
        out[..., part.start : part.stop] = part.result
    return out.reshape((*out.shape[:-1], *leaf.shape))


# ---------------------------------------------------------------- pieces of leaves
def pieces(job: Run, leaf: plan.Leaf) -> list[Piece]:
    """The pieces in which a leaf passes its stages."""
    entries = math.prod(leaf.shape)
    if entries == 0 or not _chunked(job, leaf):
        return [Piece(leaf, 0, entries, True)]
    return [Piece(leaf, start, min(start + SIZES[-1], entries), False) for start in range(0, entries, SIZES[-1])]


def _chunked(job: Run, leaf: plan.Leaf) -> bool:
    return all(job.operator.stages[i].entrywise for i in plan.pipeline(job.operator, leaf)) and _plain(job, leaf)


def _plain(job: Run, leaf: plan.Leaf) -> bool:
    return not hasattr(job.source.dtypes[leaf.name], "factors")


def _origins(job: Run, leaves: Iterable[plan.Leaf], upto: int) -> Iterator[tuple[Piece, "Way", Any]]:
    """(piece, its way, its entries) over all pieces of leaves; where reading takes time, other threads read ahead."""
    ways = ((piece, way) for leaf in leaves for way in [_way(job, leaf, upto)] for piece in pieces(job, leaf))
    if not getattr(job.source, "reads_ahead", False):
        yield from ((piece, way, _read(job, piece)) for piece, way in ways)
        return
    read = lambda piece: (lambda: _read(job, piece)) if piece.whole else _readers().submit(_read, job, piece).result
    for piece, way, entries in _ahead((piece, way, read(piece)) for piece, way in ways):
        yield piece, way, entries()


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "tvjax-read")


def _read(job: Run, piece: Piece):
    if piece.whole:
        return job.source.whole(piece.leaf.name)
    return _pad(job.source.piece(piece.leaf.name, piece.start, piece.stop))


def _pad(x: np.ndarray) -> np.ndarray:
    """Entries (tasks, n) padded with zeros to the next fixed size, which every stage and statistic ignores."""
    size = next(size for size in SIZES if size >= x.shape[-1])
    return x if x.shape[-1] == size else np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _cut(array, piece: Piece):
    """The part of entry-wise data (shaped as the leaf, or as the stack) that belongs to a piece."""
    flat = np.asarray(array).reshape(*np.shape(array)[: np.ndim(array) - len(piece.leaf.shape)], -1)
    return _pad(flat[..., piece.start : piece.stop])


# ---------------------------------------------------------------- stages
class Way(NamedTuple):
    """A leaf's stages from where it has been taken to before a given one, ready to apply."""

    stages: tuple
    values: tuple
    state: Any  # where the leaf has been taken to, None at the start


def _way(job: Run, leaf: plan.Leaf, upto: int) -> Way:
    done, state = job.kept.get(leaf.name, (0, None))
    indices = [i for i in plan.pipeline(job.operator, leaf) if done <= i < upto]
    stats = lambda i: enumerate(job.operator.stages[i].stats)
    value = lambda i: tuple(job.values[i, j][group(stat.scope, leaf.name)] for j, stat in stats(i))
    return Way(tuple(plan.localise(job.operator.stages[i], leaf) for i in indices), tuple(map(value, indices)), state)


def _inputs(job: Run, piece: Piece, way: Way, origin):
    """The arguments of `_through` that take a piece along its way."""
    leaf = piece.leaf
    stages = way.stages if piece.whole else tuple(_cut_numbers(stage, piece) for stage in way.stages)
    needed = {need for stage in stages for need in stage.needs if need in job.data}
    found = {need: plan.datum(job.data, need, leaf.name) for need in needed}
    fed = {need: datum if piece.whole else _cut(datum, piece) for need, datum in found.items()}
    place = plan.Place(plan.hashed(leaf.name), job.tasks, np.uint32(piece.start), np.float32(leaf.depth))
    return stages, way.values, origin if way.state is None else way.state, origin, place, fed


def _cut_numbers(stage, piece: Piece):
    cut = {k: numbers.Entries({"": _cut(v.array, piece)})
           for k, v in stage.numbers.items() if isinstance(v, numbers.Entries)}
    return dataclasses.replace(stage, numbers={**stage.numbers, **cut}) if cut else stage


@jax.jit
def _through(stages, values, x, origin, place, fed):
    """A piece after its stages, and whether all that went in is finite."""
    return _stages(stages, values, x, origin, place, fed), _finite(x)


@functools.partial(jax.jit, static_argnames="f")
def _measured(stages, values, x, origin, place, fed, *, f: Callable):
    return f(_stages(stages, values, x, origin, place, fed))


def _finite(x):
    one = lambda part: jnp.isfinite(sum_tasks(0 * part) if part.ndim else part).all()
    return jnp.stack([one(part) for part in jax.tree.leaves(x)]).all()


def _stages(stages, values, x, origin, place, fed):
    for stage, mine in zip(stages, values, strict=True):
        x = plan.apply(stage, mine, x, place, origin, fed)
    return x


def _ahead(items: Iterator) -> Iterator:
    """The same items (a piece first), started a little ahead of their use, so that reading and computing overlap.

    Whole leaves run side by side as far as few of them are under way; a large one goes alone, since two of them may be
    more than memory holds.
    """
    waiting: deque = deque()
    under_way = lambda: sum(item[0].stop for item in waiting if item[0].whole)
    for item in items:
        waiting.append(item)
        while len(waiting) > AHEAD or under_way() > WHOLE:
            yield waiting.popleft()
    yield from waiting
