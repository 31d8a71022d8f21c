"""The pass that counts scores above a bracket and collects those inside it, and perhaps takes a sum along.

Where a trim by these scores is followed by a sum over the whole model, the same pass takes that sum: entries outside of
the bracket are decided before the threshold is known, and the few others are held until it is.
"""
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tvjax.merging import numbers, plan, ranking, streamed
from tvjax.merging import pieces as cuts
from tvjax.merging.ahead import ahead, carried, readers
from tvjax.merging.numbers import each_task
from tvjax.merging.operator import Operator
from tvjax.merging.pieces import Piece, pad
from tvjax.merging.statistics import Kth, Sum

HELD = 1 << 25  # undecided entries, of all tasks, that are held; with more, the sum takes a pass of its own


def behind(operator: Operator, i: int) -> int | None:
    """The stage whose sum the pass for the k-th largest of stage `i` can take along, None where there is none.

    What stands between may depend on an entry of all tasks alone, not on its place, its leaf or the data.
    """
    stages = operator.stages
    if not _cuts(stages[i].stats):
        return None
    for j in range(i + 1, len(stages)):
        if stages[j].guards != stages[i].guards:
            return None
        if stages[j].stats:
            mine = stages[j].stats
            same = len(mine) == 1 and isinstance(mine[0], Sum) and mine[0].scope == "global"
            return j if same and all(map(_plain, stages[:j])) else None
    return None


def _cuts(stats) -> bool:
    return len(stats) == 1 and isinstance(stats[0], Kth) and stats[0].cuts and stats[0].scope == "global"


def _plain(stage) -> bool:
    return stage.entrywise and not stage.needs and not any(map(numbers.varies, stage.numbers.values()))


class Pass:
    """Passes over the pieces of leaves at stage `upto`; called with a bracket, it does what `ranking.collected` does.

    along: the stage whose sum is taken along, None for none.
    """

    def __init__(self, job: streamed.Run, upto: int, members, score, along: int | None = None):
        self.job, self.upto, self.members, self.score, self.along = job, upto, members, score, along
        self.parts: list[Any] = []
        self.undecided: list[np.ndarray] | None = None

    def __call__(self, low: np.ndarray, high: np.ndarray):
        above, inside = np.zeros(len(low), np.int64), [ranking.Tally() for _ in low]
        self.parts, self.undecided = [], [] if self.along is not None else None
        for over, found, part, held in self._sides(low, high):
            above += over
            for tally, row in zip(inside, found, strict=True):
                tally.add(*row)
            if self.undecided is not None and held is not None:
                self.parts.append(part)
                self.undecided.append(held)
                if len(self.parts) % 64 == 0 and sum(held.size for held in self.undecided) > HELD:
                    self.undecided = None
        return above, inside

    def _sides(self, low, high) -> Iterator[tuple]:
        """`_side` of all pieces in order; where the scores are |entries| of chunks, threads read and count."""
        job, members, upto = self.job, self.members, self.upto
        ways = [(piece, way) for leaf in members for way in [streamed._way(job, leaf, upto)]
                for piece in streamed.pieces(job, leaf)]
        if self.score is jnp.abs and not any(piece.whole or way.stages for piece, way in ways):
            work = carried(
                lambda piece, way: self._side(piece, way, np.asarray(streamed._read(job, piece)), None, low, high))
            started = ((piece, readers().submit(work, piece, way)) for piece, way in ways)
            yield from (future.result() for _, future in ahead(started))
            return
        scored = ((piece, way, origin, streamed._measured(*streamed._inputs(job, piece, way, origin), f=self.score))
                  for piece, way, origin in streamed._origins(job, members, upto))
        for piece, way, origin, scores in ahead(scored):
            yield self._side(piece, way, np.asarray(origin), np.asarray(scores), low, high)

    def _side(self, piece: Piece, way: streamed.Way, origin, scores, low, high):
        """(per task how many scores exceed `high`, and what a tally adds; the sum over entries that are decided, and
        the others) of a piece."""
        along = self.undecided is not None
        mask = np.zeros(origin.shape[1], bool) if along else None
        over, found = np.zeros(len(low), np.int64), []
        for t in range(len(low)):  # one task after the other: its scores stay in the cache
            row = np.abs(origin[t]) if scores is None else scores[t]
            row = row.reshape(-1) if piece.whole else row[: piece.stop - piece.start]
            over[t], within, *adds = ranking.side(row, low[t], high[t])
            found.append(adds)
            if mask is not None and low[t] != high[t]:
                mask[: len(row)] |= within
        if mask is None:
            return over, found, None, None
        stages, values = self._after(piece.leaf, way, high)
        part = _decided(stages, values, origin, mask, self._place(), f=self._sum().f)
        return over, found, part, origin[:, np.flatnonzero(mask)]

    def _sum(self) -> Sum:
        assert self.along is not None
        return self.job.operator.stages[self.along].stats[0]

    def _after(self, leaf: plan.Leaf, way: streamed.Way, threshold):
        """The stages from the start to before the sum, and their values."""
        stages = tuple(plan.localise(stage, leaf) for stage in self.job.operator.stages[self.upto : self.along])
        return way.stages + stages, (*way.values, (threshold,), *((),) * (len(stages) - 1))

    def _place(self) -> plan.Place:
        return plan.Place(plan.hashed(""), self.job.tasks, np.uint32(0), np.float32(0))

    def sum_at(self, threshold: np.ndarray) -> list[Any] | None:
        """The parts of the sum once the threshold is known; None where it was not taken along."""
        if self.undecided is None or not self.parts:
            return None
        leaf, rest, size = self.members[0], np.concatenate(self.undecided, 1), cuts.SIZES[-1]
        stages, values = self._after(leaf, streamed._way(self.job, leaf, self.upto), threshold)
        pieces = (pad(rest[:, at : at + size]) for at in range(0, rest.shape[1], size))
        last = (streamed._measured(stages, values, piece, None, self._place(), {}, f=self._sum().f) for piece in pieces)
        return [*self.parts, *last]


@functools.partial(jax.jit, static_argnames="f")
def _decided(stages, values, x, undecided, place, *, f):
    """f of a piece behind its stages, without the entries that are undecided."""
    x = each_task(lambda row: jnp.where(undecided, 0, row), x)
    return f(streamed._stages(stages, values, x, None, place, {}))


def passes(operator: Operator) -> int:
    """How often the inputs are read for the declared statistics and the merge; more where a bracket misses."""
    count, taken = 1, {behind(operator, i) for i in range(len(operator.stages))}
    for i, stage in enumerate(operator.stages):
        for stat in stage.stats:
            whole = isinstance(stat, Kth) and any(one.needs for one in operator.stages[:i])  # no sample without all
            count += (2 if whole else 1) if i not in taken else 0
    return count


