"""Statistics folded over pieces of leaves: sums and extremes as they come, the exact k-th largest by `ranking`."""
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax.merging import counting, numbers, pieces, plan, streamed
from tvjax.merging.ahead import ahead
from tvjax.merging.pieces import Piece, pad
from tvjax.merging.ranking import RUN, kth_largest
from tvjax.merging.statistics import Kth, Sum
from tvjax.merging.streamed import Run, Way
from tvjax.merging.traced import rank


def values(job: Run, i: int, j: int, groups) -> None:
    """Fills in the values of statistic `j` of stage `i`, by group of leaves; perhaps those of a later stage too."""
    stat = job.operator.stages[i].stats[j]
    job.values[i, j] = {}
    for name, members in groups.items():
        for leaf in members:
            _keep(job, leaf, i)
        if isinstance(stat, Kth):
            job.values[i, j][name] = _kth(job, i, stat, members)
        else:
            job.values[i, j][name] = _folded(stat, (made for _, made in _measurements(job, i, members, stat)))


def _folded(stat, parts: Iterator[Any]):
    if isinstance(stat, Sum):
        return _total(list(parts))
    pick = {"Greatest": np.max, "Least": np.min}[type(stat).__name__]
    return pick(np.stack([pick(part, 1) for part in parts]), 0)


def _total(parts: list[Any]):
    parts = [jax.tree.map(np.asarray, part) for part in parts]
    dtype = np.result_type(*[part.dtype for part in jax.tree.leaves(parts)])
    return jax.tree.map(lambda *many: np.sum(np.stack(many), 0, dtype=np.float64).astype(dtype), *parts)


def _kth(job: Run, i: int, stat: Kth, members):
    entries = sum(_width(job, leaf, stat.score) for leaf in members)
    k = rank(plan.share_of(stat.share, members, stat.scope), entries, stat.extra)
    along = counting.behind(job.operator, i) if all(streamed._chunked(job, leaf) for leaf in members) else None
    once = counting.Pass(job, i, members, stat.score, along)
    scores = lambda: (made for _, made in _measurements(job, i, members, stat))
    found = kth_largest(scores, k, entries, sample=_sampler(job, stat, i, members), collect=once)
    if (parts := once.sum_at(found)) is not None:
        job.values[along, 0] = {"": _total(parts)}
    return found


def _measurements(job: Run, upto: int, members, stat) -> Iterator[tuple[Piece, Any]]:
    """(piece, what the statistic takes of it where the stages before `upto` have taken it) over all pieces of leaves:
    a sum's part, or scores (tasks, entries) without padding."""
    f = stat.f if isinstance(stat, Sum) else stat.score
    started = ((piece, streamed._measured(*streamed._inputs(job, piece, way, origin), f=f))
               for piece, way, origin in streamed._origins(job, members, upto))
    for piece, made in ahead(started):
        yield piece, made if isinstance(stat, Sum) else _unpadded(piece, np.asarray(made))


def _unpadded(piece: Piece, made: np.ndarray) -> np.ndarray:
    made = made.reshape(made.shape[0], -1)
    return made if piece.whole else made[:, : piece.stop - piece.start]


def _width(job: Run, leaf: plan.Leaf, score: Callable) -> int:
    """How many scores a leaf has: one for each entry, or for each of what whole-leaf stages have made of it."""
    _, state = job.kept.get(leaf.name, (0, None))
    return math.prod(leaf.shape) if state is None else math.prod(jax.eval_shape(score, state).shape[1:])


def _keep(job: Run, leaf: plan.Leaf, upto: int) -> None:
    """Takes a leaf through whole-leaf stages once, however many statistics come after them."""
    way = streamed._way(job, leaf, upto)
    if way.stages and not streamed._chunked(job, leaf):
        [(piece, way, origin)] = streamed._origins(job, [leaf], upto, lean=True)
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
        """Runs of neighbours, `every` lengths of one from each other over all leaves as if they were one."""
        before, step = 0, RUN * every
        for leaf, way in zip(members, ways, strict=True):
            size, place = math.prod(leaf.shape), plan.Place(plan.hashed(leaf.name), job.tasks, np.uint32(0),
                                                            np.float32(leaf.depth))
            runs = [job.source.piece(leaf.name, at, min(at + RUN, size)) for at in range(-before % step, size, step)]
            for first in range(0, len(runs), pieces.SIZES[-1] // RUN):
                part = np.concatenate(runs[first : first + pieces.SIZES[-1] // RUN], 1)
                yield np.asarray(_score(stat, way, pad(part), place))[:, : part.shape[1]]
            before += size

    return sample


def _score(stat, way: Way, x: np.ndarray, place: plan.Place):
    if stat.score is jnp.abs and not way.stages:
        return np.abs(x)
    return streamed._measured(way.stages, way.values, x, None, place, {}, f=stat.score)


def _has_entries(way: Way) -> bool:
    return any(isinstance(v, numbers.Entries) for stage in way.stages for v in stage.numbers.values())
