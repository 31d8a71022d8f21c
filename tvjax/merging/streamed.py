"""The engine for concrete trees and files: two kinds of passes over pieces of leaves, so that memory is bounded by a
piece and not by the model.

A pass for each stage that declares statistics, then one that applies the leaf functions. Leaves whose stages are all
entry-wise go in chunks of fixed sizes (a few programs serve every model), others whole. Chunk boundaries and order are
the same wherever the entries come from: results from memory and from disk are equal bit by bit.
"""
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax.merging import plan
from tvjax.merging.ahead import ahead, carried, leaf_workers, readers
from tvjax.merging.numbers import sum_tasks
from tvjax.merging.operator import Operator
from tvjax.merging.pieces import Piece, chunks, cut, cut_numbers, pad
from tvjax.merging.sources import Source
from tvjax.merging.statistics import group


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
    spans: Mapping[str, tuple[int, int]] = {}  # leaf -> the entries to take, where others take the rest


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
    job = prepare(operator, source, tasks, data)
    for made in finished(job, lean=True):
        held.append(made)
        if made.stop == math.prod(made.leaf.shape):
            yield made.leaf.name, joined(job, held)
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


def finished(job: Run, names=None, *, lean: bool = False) -> Iterator[Made]:
    """The last pass: results piece by piece in order, in float32 or wider, for all leaves or those in `names`.

    lean: whole leaves come without their origin where they can do without (see `_reduced`).
    """
    leaves = job.leaves.values() if names is None else [job.leaves[name] for name in names]
    with leaf_workers(matrices(job)) as workers:
        for piece, made in ahead(_started(job, leaves, lean, workers)):
            origin, (x, finite) = made()
            job.check(finite, piece.leaf)
            if piece.whole:
                yield Made(piece.leaf, 0, piece.stop, jax.tree.map(np.asarray, x), origin)
            else:
                yield Made(piece.leaf, piece.start, piece.stop, np.asarray(x)[..., : piece.stop - piece.start], origin)


def _started(job: Run, leaves: Iterable[plan.Leaf], lean: bool, workers: ThreadPoolExecutor | None):
    """(piece, what gives its entries and what has become of them) over all pieces of leaves."""
    upto = len(job.operator.stages)

    @carried
    def made(leaf: plan.Leaf):
        [(piece, way, origin)] = _origins(job, [leaf], upto, lean=lean)
        return origin, jax.block_until_ready(_through(*_inputs(job, piece, way, origin)))

    for apart, some in itertools.groupby(leaves, lambda leaf: workers is not None and not _chunked(job, leaf)):
        if apart and workers is not None:
            yield from ((*pieces(job, leaf), workers.submit(made, leaf).result) for leaf in some)
            continue
        for piece, way, origin in _origins(job, some, upto, lean=lean):
            done = _through(*_inputs(job, piece, way, origin))
            yield piece, lambda origin=origin, done=done: (origin, done)


def matrices(job: Run) -> list[int]:
    """The entries of each matrix that goes whole."""
    return [math.prod(leaf.shape) for leaf in job.leaves.values() if len(leaf.shape) > 1 and not _chunked(job, leaf)]


def joined(job: Run, parts: list[Made]):
    """A leaf from its finished pieces, in its input dtype."""
    leaf, first = parts[0].leaf, parts[0].result
    dtype = job.source.dtypes[leaf.name]
    dtype = getattr(dtype, "factors", dtype)
    if _whole(job, leaf) or np.shape(first) == leaf.shape == (math.prod(leaf.shape),):
        return jax.tree.map(lambda part: part.astype(dtype, copy=False), first)
    out = np.empty((*first.shape[:-1], math.prod(leaf.shape)), dtype)
    for part in parts:
        out[..., part.start : part.stop] = part.result
    return out.reshape((*out.shape[:-1], *leaf.shape))


# ---------------------------------------------------------------- pieces of leaves
def pieces(job: Run, leaf: plan.Leaf) -> list[Piece]:
    """The pieces in which a leaf passes its stages."""
    if _whole(job, leaf):
        return [Piece(leaf, 0, math.prod(leaf.shape), True)]
    return chunks(leaf, job.source.tasks, *job.spans.get(leaf.name, ()))


def _whole(job: Run, leaf: plan.Leaf) -> bool:
    return math.prod(leaf.shape) == 0 or not _chunked(job, leaf)


def _chunked(job: Run, leaf: plan.Leaf) -> bool:
    return all(job.operator.stages[i].entrywise for i in plan.pipeline(job.operator, leaf)) and _plain(job, leaf)


def _plain(job: Run, leaf: plan.Leaf) -> bool:
    return not hasattr(job.source.dtypes[leaf.name], "factors")


def _origins(job: Run, leaves: Iterable[plan.Leaf], upto: int, *, lean: bool = False):
    """(piece, its way, its entries) over all pieces of leaves."""
    found = lambda leaf: _reduced(job, leaf, _way(job, leaf, upto)) if lean else _way(job, leaf, upto)
    return _with_entries(job, ((piece, way) for leaf in leaves for way in [found(leaf)] for piece in pieces(job, leaf)))


def _with_entries(job: Run, ways: Iterable[tuple[Piece, "Way"]]) -> Iterator[tuple[Piece, "Way", Any]]:
    """The same with what the way begins with, None where that is there already; where reading takes time, other threads
    read ahead."""
    if not getattr(job.source, "reads_ahead", False):
        yield from ((piece, way, None if way.lean else _read(job, piece)) for piece, way in ways)
        return
    now = lambda piece: lambda: _read(job, piece)
    read = lambda piece, way: (lambda: None) if way.lean else now(piece) if piece.whole else readers().submit(
        _read, job, piece).result
    for piece, way, entries in ahead((piece, way, read(piece, way)) for piece, way in ways):
        yield piece, way, entries()


def _reduced(job: Run, leaf: plan.Leaf, way: "Way") -> "Way":
    """The way of a leaf that goes whole, from behind the entry-wise stages that reduce it over tasks: chunks pass
    those, so that it is never held for all tasks. The same way where there are none, or its origin is needed."""
    count = next((i for i, stage in enumerate(way.stages) if not stage.entrywise), 0)
    if way.state is not None or count == 0 or not leaf.shape or not _plain(job, leaf) or any(
            "origin" in stage.needs for stage in way.stages[count:]):
        return way
    first, cuts, held = Way(way.stages[:count], way.values[:count], None), chunks(leaf, job.source.tasks), None
    started = ((piece, _through(*_inputs(job, piece, first, entries)))
               for piece, _, entries in _with_entries(job, ((piece, first) for piece in cuts)))
    for piece, (x, finite) in ahead(started):
        if x.ndim != 1:
            return way
        job.check(finite, leaf)
        held = np.empty(math.prod(leaf.shape), x.dtype) if held is None else held
        held[piece.start : piece.stop] = x[: piece.stop - piece.start]
    return way if held is None else Way(way.stages[count:], way.values[count:], held.reshape(leaf.shape), True)


def _read(job: Run, piece: Piece):
    if piece.whole:
        return job.source.whole(piece.leaf.name)
    return pad(job.source.piece(piece.leaf.name, piece.start, piece.stop))


# ---------------------------------------------------------------- stages
class Way(NamedTuple):
    """A leaf's stages from where it has been taken to before a given one, ready to apply."""

    stages: tuple
    values: tuple
    state: Any  # where the leaf has been taken to, None at the start
    lean: bool = False  # whether nothing else is needed


def _way(job: Run, leaf: plan.Leaf, upto: int) -> Way:
    done, state = job.kept.get(leaf.name, (0, None))
    indices = [i for i in plan.pipeline(job.operator, leaf) if done <= i < upto]
    stats = lambda i: enumerate(job.operator.stages[i].stats)
    value = lambda i: tuple(job.values[i, j][group(stat.scope, leaf.name)] for j, stat in stats(i))
    return Way(tuple(plan.localise(job.operator.stages[i], leaf) for i in indices), tuple(map(value, indices)), state)


def _inputs(job: Run, piece: Piece, way: Way, origin):
    """The arguments of `_through` that take a piece along its way."""
    leaf = piece.leaf
    stages = way.stages if piece.whole else tuple(cut_numbers(stage, piece) for stage in way.stages)
    needed = {need for stage in stages for need in stage.needs if need in job.data}
    found = {need: plan.datum(job.data, need, leaf.name) for need in needed}
    fed = {need: datum if piece.whole else cut(datum, piece) for need, datum in found.items()}
    place = plan.Place(plan.hashed(leaf.name), job.tasks, np.uint32(piece.start), np.float32(leaf.depth))
    return stages, way.values, origin if way.state is None else way.state, origin, place, fed


@jax.jit
def _through(stages, values, x, origin, place, fed):
    """A piece after its stages, and whether all that went in is finite."""
    return _stages(stages, values, x, origin, place, fed), _finite(x, len(place.tasks))


@functools.partial(jax.jit, static_argnames="f")
def _measured(stages, values, x, origin, place, fed, *, f: Callable):
    return f(_stages(stages, values, x, origin, place, fed))


def _finite(x, tasks: int):
    """Whether all entries are finite; of a stack through one sum over tasks, which is quick."""
    one = lambda part: sum_tasks(0 * part) if part.shape[:1] == (tasks,) else part
    return jnp.stack([jnp.isfinite(one(part)).all() for part in jax.tree.leaves(x)]).all()


def _stages(stages, values, x, origin, place, fed):
    for stage, mine in zip(stages, values, strict=True):
        x = plan.apply(stage, mine, x, place, origin, fed)
    return x
