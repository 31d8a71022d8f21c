"""The engine for concrete trees and files: two kinds of passes over pieces of leaves, so that memory is bounded by a piece and not by the model.

A pass for each stage that declares statistics, then one that applies the leaf functions. Leaves whose stages are all entry-wise go in chunks of
fixed sizes (a few programs serve every model), others whole. Chunk boundaries and order are the same wherever the entries come from: results
from memory and from disk are equal bit by bit.
"""
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax.merging import numbers, plan
from tvjax.merging.operator import Operator
from tvjax.merging.ranking import kth_largest
from tvjax.merging.sources import Source
from tvjax.merging.statistics import Kth, Sum, group
from tvjax.merging.traced import rank
from tvjax.tree import wide

SIZES = (1 << 10, 1 << 14, 1 << 18)  # multiples of draws.BLOCK


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


def run(operator: Operator, source: Source, tasks, data: Mapping) -> Iterator[tuple[str, Any]]:
    """Yields (name, result) leaf by leaf, each in its input dtype; raises ValueError naming the first leaf with NaN or infinite entries."""
    job = Run(operator, source, tasks, data, plan.leaves(source.shapes), {}, {})
    for i, stage in enumerate(operator.stages):
        for j, stat in enumerate(stage.stats):
            here = [leaf for leaf in job.leaves.values() if stage.holds(leaf.name, leaf.shape)]
            job.values[i, j] = {name: _value(job, i, stat, members) for name, members in plan.groups(stat.scope, here).items()}
    for leaf in job.leaves.values():
        yield leaf.name, _finish(job, leaf)


# ---------------------------------------------------------------- pieces of leaves
def pieces(job: Run, leaf: plan.Leaf) -> list[Piece]:
    """The pieces in which a leaf passes its stages."""
    entries = math.prod(leaf.shape)
    if not _chunked(job, leaf) or entries == 0:
        return [Piece(leaf, 0, entries, True)]
    return [Piece(leaf, start, min(start + SIZES[-1], entries), False) for start in range(0, entries, SIZES[-1])]


def _chunked(job: Run, leaf: plan.Leaf) -> bool:
    return all(job.operator.stages[i].entrywise for i in plan.pipeline(job.operator, leaf)) and _plain(job, leaf)


def _plain(job: Run, leaf: plan.Leaf) -> bool:
    return not hasattr(job.source.dtypes[leaf.name], "factors")


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
def _inputs(job: Run, piece: Piece, upto: int):
    """The arguments of `_through` that take a piece through its stages before `upto`."""
    leaf = piece.leaf
    done, state = job.kept.get(leaf.name, (0, None))
    indices = [i for i in plan.pipeline(job.operator, leaf) if done <= i < upto]
    stages = tuple(plan.localise(job.operator.stages[i], leaf) for i in indices)
    if not piece.whole:
        stages = tuple(_cut_numbers(stage, piece) for stage in stages)
    values = tuple(tuple(job.values[i, j][group(stat.scope, leaf.name)] for j, stat in enumerate(job.operator.stages[i].stats)) for i in indices)
    needed = {need for stage in stages for need in stage.needs if need in job.data}
    fed = {need: job.data[need][leaf.name] if piece.whole else _cut(job.data[need][leaf.name], piece) for need in needed}
    origin = _read(job, piece)
    x = origin if state is None else state
    place = plan.Place(plan.hashed(leaf.name), job.tasks, np.uint32(piece.start), np.float32(leaf.depth))
    return stages, values, x, origin, place, fed


def _cut_numbers(stage, piece: Piece):
    cut = {k: numbers.Entries({"": _cut(v.array, piece)}) if isinstance(v, numbers.Entries) else v for k, v in stage.numbers.items()}
    return type(stage)(stage.leaf, cut, (), stage.options, stage.needs, stage.entrywise)


@jax.jit
def _through(stages, values, x, origin, place, fed):
    """A piece after its stages, and whether all that went in is finite."""
    finite = jnp.stack([jnp.isfinite(part).all() for part in jax.tree.leaves(x)]).all()
    return _stages(stages, values, x, origin, place, fed), finite


@functools.partial(jax.jit, static_argnames="f")
def _measured(stages, values, x, origin, place, fed, *, f: Callable):
    return f(_stages(stages, values, x, origin, place, fed))


def _stages(stages, values, x, origin, place, fed):
    for stage, mine in zip(stages, values, strict=True):
        x = plan.apply(stage, mine, x, place, origin, fed)
    return x


# ---------------------------------------------------------------- statistics
def _value(job: Run, upto: int, stat, members):
    for leaf in members:
        _keep(job, leaf, upto)
    cut = [piece for leaf in members for piece in pieces(job, leaf)]
    if isinstance(stat, Sum):
        parts = _ahead(_measured(*_inputs(job, piece, upto), f=stat.f) for piece in cut)
        dtype = widest_float(job, members)
        return jax.tree.map(lambda *many: np.sum(np.stack(many), 0, dtype=np.float64).astype(dtype), *[jax.tree.map(np.asarray, p) for p in parts])
    scores = functools.partial(_scores, job, stat.score, upto)
    if not isinstance(stat, Kth):
        pick = {"Greatest": np.max, "Least": np.min}[type(stat).__name__]
        return pick(np.stack([pick(part, 1) for part in scores(cut)]), 0)
    share = plan.share_of(stat.share, members, stat.scope)
    entries = sum(piece.stop - piece.start for piece in cut)
    return kth_largest(lambda: scores(cut), rank(share, entries, stat.extra), entries, sample=_sampler(job, stat, upto, cut))


def widest_float(job: Run, members):
    return np.result_type(*[wide(getattr(dtype, "factors", dtype)) for dtype in (job.source.dtypes[leaf.name] for leaf in members)])


def _keep(job: Run, leaf: plan.Leaf, upto: int) -> None:
    """Takes a leaf through whole-leaf stages once, however many statistics come after them."""
    if not _chunked(job, leaf) and any(job.kept.get(leaf.name, (0, None))[0] <= i < upto for i in plan.pipeline(job.operator, leaf)):
        [piece] = pieces(job, leaf)
        x, finite = _through(*_inputs(job, piece, upto))
        _check(finite, leaf)
        job.kept[leaf.name] = (upto, x)


def _scores(job: Run, score: Callable, upto: int, cut) -> Iterator[np.ndarray]:
    """The scores of all pieces, (tasks, entries) each."""
    for piece, made in zip(cut, _ahead(_measured(*_inputs(job, piece, upto), f=score) for piece in cut), strict=True):
        made = np.asarray(made)
        yield made.reshape(made.shape[0], -1)[:, : piece.stop - piece.start]


def _sampler(job: Run, stat, upto: int, cut):
    """A function every -> scores of every so-many-th entry, where reading them alone gives the same scores."""
    first = {id(stage): stage for piece in cut for stage in (job.operator.stages[i] for i in plan.pipeline(job.operator, piece.leaf) if i < upto)}
    alone = all(not stage.needs and not any(isinstance(v, numbers.Entries) for v in stage.numbers.values()) for stage in first.values())
    if not alone or any(piece.whole for piece in cut):
        return None

    def sample(every: int) -> Iterator[np.ndarray]:
        for leaf in {piece.leaf.name: piece.leaf for piece in cut}.values():
            x = job.source.piece(leaf.name, 0, math.prod(leaf.shape), every)
            stages, values, _, _, place, fed = _inputs_of(job, leaf, upto)
            yield np.asarray(_measured(stages, values, _pad_any(x), None, place, fed, f=stat.score))[:, : x.shape[1]]

    return sample


def _inputs_of(job: Run, leaf: plan.Leaf, upto: int):
    indices = [i for i in plan.pipeline(job.operator, leaf) if i < upto]
    stages = tuple(plan.localise(job.operator.stages[i], leaf) for i in indices)
    values = tuple(tuple(job.values[i, j][group(stat.scope, leaf.name)] for j, stat in enumerate(job.operator.stages[i].stats)) for i in indices)
    return stages, values, None, None, plan.Place(plan.hashed(leaf.name), job.tasks, np.uint32(0), np.float32(leaf.depth)), {}


def _pad_any(x: np.ndarray) -> np.ndarray:
    size = SIZES[0]
    while size < x.shape[1]:
        size *= 4
    return np.pad(x, [(0, 0), (0, size - x.shape[1])])


# ---------------------------------------------------------------- results
def _finish(job: Run, leaf: plan.Leaf):
    cut = pieces(job, leaf)
    dtype = job.source.dtypes[leaf.name]
    made = _ahead(_through(*_inputs(job, piece, len(job.operator.stages))) for piece in cut)
    if cut[0].whole:
        [(x, finite)] = made
        _check(finite, leaf)
        return jax.tree.map(lambda part: np.asarray(part.astype(getattr(dtype, "factors", dtype))), x)
    out = None
    for piece, (x, finite) in zip(cut, made, strict=True):
        _check(finite, leaf)
        x = np.asarray(x)
        out = np.empty((*x.shape[:-1], math.prod(leaf.shape)), dtype) if out is None else out
        out[..., piece.start : piece.stop] = x[..., : piece.stop - piece.start]
    return out.reshape(*out.shape[:-1], *leaf.shape)


def _check(finite, leaf: plan.Leaf) -> None:
    if not finite:
        raise ValueError(f"{leaf.name} holds NaN or infinite entries; a merge would spread them")


def _ahead(items: Iterator, by: int = 2) -> Iterator:
    """The same items, started a little ahead of their use, so that reading and computing overlap."""
    waiting: deque = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > by:
            yield waiting.popleft()
    yield from waiting
