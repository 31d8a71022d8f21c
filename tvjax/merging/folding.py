"""Statistics folded over pieces of leaves: sums and extremes as they come, the exact k-th largest by `ranking`."""
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax.merging import numbers, plan, streamed
from tvjax.merging.ranking import kth_largest
from tvjax.merging.statistics import Kth, Sum
from tvjax.merging.streamed import Piece, Run, Way
from tvjax.merging.traced import rank


def value(job: Run, upto: int, stat, members):
    for leaf in members:
        _keep(job, leaf, upto)
    measured = functools.partial(_measurements, job, upto, members)
    if isinstance(stat, Sum):
        parts = [jax.tree.map(np.asarray, part) for _, part in measured(stat.f)]
        dtype = np.result_type(*[part.dtype for part in jax.tree.leaves(parts)])
        return jax.tree.map(lambda *many: np.sum(np.stack(many), 0, dtype=np.float64).astype(dtype), *parts)
    if not isinstance(stat, Kth):
        pick = {"Greatest": np.max, "Least": np.min}[type(stat).__name__]
        return pick(np.stack([pick(part, 1) for part in _scores(measured(stat.score))]), 0)
    entries = sum(_width(job, leaf, stat.score) for leaf in members)
    k = rank(plan.share_of(stat.share, members, stat.scope), entries, stat.extra)
    untouched = lambda leaf: streamed._chunked(job, leaf) and not streamed._way(job, leaf, upto).stages
    plain = stat.score is jnp.abs and all(untouched(leaf) for leaf in members)
    scores = lambda: _scores(_magnitudes(job, upto, members) if plain else measured(stat.score))
    return kth_largest(scores, k, entries, sample=_sampler(job, stat, upto, members))


def _measurements(job: Run, upto: int, members, f: Callable) -> Iterator[tuple[Piece, Any]]:
    """(piece, f of it where the stages before `upto` have taken it) over all pieces of all leaves."""
    started = ((piece, streamed._measured(*streamed._inputs(job, piece, way, origin), f=f))
               for piece, way, origin in streamed._origins(job, members, upto))
    yield from streamed._ahead(started)


def _magnitudes(job: Run, upto: int, members) -> Iterator[tuple[Piece, Any]]:
    """(piece, |entries|) of what no stage before `upto` changes: the commonest scores, without a call of JAX."""
    return ((piece, np.abs(origin)) for piece, _, origin in streamed._origins(job, members, upto))


def _scores(measured) -> Iterator[np.ndarray]:
    """The scores of all pieces, (tasks, entries) each, without padding."""
    for piece, made in measured:
        made = np.asarray(made)
        made = made.reshape(made.shape[0], -1)
        yield made if piece.whole else made[:, : piece.stop - piece.start]


def _width(job: Run, leaf: plan.Leaf, score: Callable) -> int:
    """How many scores a leaf has: one for each entry, or for each of what whole-leaf stages have made of it."""
    _, state = job.kept.get(leaf.name, (0, None))
    return math.prod(leaf.shape) if state is None else math.prod(jax.eval_shape(score, state).shape[1:])


def _keep(job: Run, leaf: plan.Leaf, upto: int) -> None:
    """Takes a leaf through whole-leaf stages once, however many statistics come after them."""
    way = streamed._way(job, leaf, upto)
    if way.stages and not streamed._chunked(job, leaf):
        [(piece, _, origin)] = streamed._origins(job, [leaf], upto)
        x, finite = streamed._through(*streamed._inputs(job, piece, way, origin))
        job.check(finite, leaf)
        job.kept[leaf.name] = (upto, x)


def _sampler(job: Run, stat, upto: int, members):
    """A function every -> scores of every so-many-th entry, where these can be had from those entries alone."""
    ways = [streamed._way(job, leaf, upto) for leaf in members]
    local = not any(stage.needs for way in ways for stage in way.stages)
    if not local or not all(streamed._chunked(job, leaf) for leaf in members) or any(_has_entries(way) for way in ways):
        return None

    def sample(every: int) -> Iterator[np.ndarray]:
        for leaf, way in zip(members, ways, strict=True):
            x = job.source.piece(leaf.name, 0, math.prod(leaf.shape), every)
            place = plan.Place(plan.hashed(leaf.name), job.tasks, np.uint32(0), np.float32(leaf.depth))
            for start in range(0, x.shape[1], streamed.SIZES[-1]):
                part = x[:, start : start + streamed.SIZES[-1]]
                yield np.asarray(_score(stat, way, streamed._pad(part), place))[:, : part.shape[1]]

    return sample


def _score(stat, way: Way, x: np.ndarray, place: plan.Place):
    if stat.score is jnp.abs and not way.stages:
        return np.abs(x)
    return streamed._measured(way.stages, way.values, x, None, place, {}, f=stat.score)


def _has_entries(way: Way) -> bool:
    return any(isinstance(v, numbers.Entries) for stage in way.stages for v in stage.numbers.values())
