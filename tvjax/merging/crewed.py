"""The streaming engine for a crew: each process reads, measures and merges its own leaves, and its own entries of the
leaves that all share, piece by piece, a piece a device; whole leaves (decompositions, solves) go one to a device and
are never split.

Statistics are exact: sums in float64, extremes as they are, the k-th largest by counting the digits of float bits in
three rounds over each process's own entries. What goes between processes is a few numbers for each.
"""
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tvjax.merging import plan, streamed
from tvjax.merging.ahead import leaf_workers
from tvjax.merging.crew import Crew, side_by_side
from tvjax.merging.operator import Operator
from tvjax.merging.sources import Source
from tvjax.merging.statistics import Kth, Sum
from tvjax.merging.streamed import Made, Run
from tvjax.merging.traced import rank

DIGIT = 11  # bits that are counted at once: 2048 counts a task
HELD = 1 << 22  # scores of all tasks that are held instead of read anew for each digit


def run(operator: Operator, source: Source, tasks, data: Mapping, crew: Crew) -> dict[str, Any]:
    """{name: result} of the leaves that this process owns, each in its input dtype, as `streamed.run` gives them; of
    the leaves that all share none."""
    job = prepare(operator, source, tasks, data, crew)
    held: dict[str, list[Made]] = {}
    for made in finished(job, crew, [name for name in job.leaves if crew.owns(name) and name not in crew.cuts]):
        held.setdefault(made.leaf.name, []).append(made)
    return {name: streamed.joined(job, held[name]) for name in job.leaves if name in held}


def prepare(operator: Operator, source: Source, tasks, data: Mapping, crew: Crew,
            check: Callable = streamed.refuse) -> Run:
    """Computes all statistics that the operator declares, each process over its own leaves.

    One process alone takes those of the plain engine, which reads less: they are bound by reading, not by devices.
    """
    if crew.count == 1:
        return streamed.prepare(operator, source, tasks, data, check)
    job = Run(operator, source, tasks, data, plan.leaves(source.shapes), {}, {}, check, crew.spans)
    for i, stage in enumerate(operator.stages):
        here = [leaf for leaf in job.leaves.values() if stage.holds(leaf.name, leaf.shape)]
        if stage.stats:
            _keep(job, crew, [leaf for leaf in here if crew.owns(leaf.name)], i)
        for j, stat in enumerate(stage.stats):
            job.values[i, j] = _values(job, crew, i, stat, plan.groups(stat.scope, here))
    return job


def finished(job: Run, crew: Crew, names: Iterable[str]) -> Iterator[Made]:
    """The last pass over the leaves in `names`: pieces in their order inside of a leaf, whole leaves after the others,
    those of equal shapes side by side."""
    leaves, upto = [job.leaves[name] for name in names], len(job.operator.stages)
    with leaf_workers(streamed.matrices(job)):
        for (piece, origin), (x, finite) in side_by_side(crew, _items(job, leaves, upto), _through):
            job.check(finite, piece.leaf)
            if piece.whole:
                yield Made(piece.leaf, 0, piece.stop, x, origin)
            else:
                yield Made(piece.leaf, piece.start, piece.stop, x[..., : piece.stop - piece.start], origin)


def _items(job: Run, leaves, upto: int):
    """((piece, origin), arguments of the stages up to `upto`) of all pieces."""
    whole = lambda leaf: not streamed._chunked(job, leaf)
    ordered = sorted(leaves, key=lambda leaf: (whole(leaf), leaf.shape if whole(leaf) else ()))  # stable
    for piece, way, origin in streamed._origins(job, ordered, upto):
        yield (piece, origin), streamed._inputs(job, piece, way, origin)


def _through(stages, values, x, origin, place, fed):
    return streamed._stages(stages, values, x, origin, place, fed), streamed._finite(x, len(place.tasks))


@functools.cache
def _measured(f: Callable) -> Callable:
    return functools.partial(_measure, f)


def _measure(f, stages, values, x, origin, place, fed):
    return f(streamed._stages(stages, values, x, origin, place, fed))


def _keep(job: Run, crew: Crew, leaves, upto: int) -> None:
    """Takes leaves through the whole-leaf stages before `upto` once, however many statistics come after them."""
    late = [leaf for leaf in leaves if not streamed._chunked(job, leaf) and streamed._way(job, leaf, upto).stages]
    for (piece, _), (x, finite) in side_by_side(crew, _items(job, late, upto), _through):
        job.check(finite, piece.leaf)
        job.kept[piece.leaf.name] = (upto, x)


# ---------------------------------------------------------------- statistics
def _values(job: Run, crew: Crew, upto: int, stat, groups) -> dict[str, Any]:
    mine = {name: [leaf for leaf in members if crew.owns(leaf.name)] for name, members in groups.items()}
    if isinstance(stat, Kth):
        return _kth(job, crew, upto, stat, groups, mine)
    found = {name: _folded(stat, _parts(job, crew, upto, stat, members)) for name, members in mine.items() if members}
    every = crew.exchange(found)
    return {name: _combined(stat, [one[name] for one in every if name in one]) for name in groups}


def _parts(job: Run, crew: Crew, upto: int, stat, members) -> Iterator[Any]:
    """What the statistic takes of each piece: a sum's part, or its scores (tasks, entries) without padding."""
    f = stat.f if isinstance(stat, Sum) else stat.score
    for (piece, _), made in side_by_side(crew, _items(job, members, upto), _measured(f)):
        if isinstance(stat, Sum):
            yield made
        else:
            made = made.reshape(made.shape[0], -1)
            yield made if piece.whole else made[:, : piece.stop - piece.start]


def _folded(stat, parts: Iterator[Any]):
    """(the sum in float64, its dtype), or the extreme of this process's own."""
    if not isinstance(stat, Sum):
        return functools.reduce(_pick(stat), [_pick(stat).reduce(part, 1) for part in parts])
    held = list(parts)
    dtype = np.result_type(*[part.dtype for part in jax.tree.leaves(held)])
    return jax.tree.map(lambda *many: np.sum(np.stack(many), 0, dtype=np.float64), *held), dtype


def _combined(stat, found: list):
    if not isinstance(stat, Sum):
        return functools.reduce(_pick(stat), found)
    dtype = np.result_type(*[dtype for _, dtype in found])
    return jax.tree.map(lambda *many: functools.reduce(np.add, many).astype(dtype), *[total for total, _ in found])


def _pick(stat):
    return {"Greatest": np.maximum, "Least": np.minimum}[type(stat).__name__]


# ---------------------------------------------------------------- the k-th largest
def _kth(job: Run, crew: Crew, upto: int, stat: Kth, groups, mine) -> dict[str, Any]:
    widths = crew.exchange({name: sum(_width(job, leaf, stat.score) for leaf in members)
                            for name, members in mine.items()})
    entries = {name: sum(one[name] for one in widths) for name in groups}
    k = {name: rank(plan.share_of(stat.share, members, stat.scope), entries[name], stat.extra)
         for name, members in groups.items()}
    streams = {name: _stream(job, crew, upto, stat, members, widths[crew.rank][name])
               for name, members in mine.items()}
    kind = np.result_type(*[job.source.dtypes[leaf.name] for members in groups.values() for leaf in members])
    return kth_largest(streams, k, job.source.tasks, kind=kind, exchange=crew.exchange)


def _stream(job: Run, crew: Crew, upto: int, stat, members, width: int) -> Callable[[], Iterable[np.ndarray]]:
    stream = functools.partial(_parts, job, crew, upto, stat, members)
    if width * job.source.tasks > HELD:
        return stream
    held = list(stream())
    return lambda: held


def _width(job: Run, leaf: plan.Leaf, score: Callable) -> int:
    """How many scores a leaf has: one for each entry, or for each of what whole-leaf stages have made of it."""
    _, state = job.kept.get(leaf.name, (0, None))
    first, last = job.spans.get(leaf.name, (0, math.prod(leaf.shape)))
    return last - first if state is None else math.prod(jax.eval_shape(score, state).shape[1:])


def kth_largest(streams: Mapping[str, Callable[[], Iterable[np.ndarray]]], k: Mapping[str, Any], tasks: int, *,
                kind: Any = np.float32, exchange: Callable[[Any], list] = lambda found: [found]
                ) -> dict[str, np.ndarray]:
    """{group: per task the k-th largest of its scores} of all processes together, exact, without a sort.

    The bits of a float, read as a number (`_ordered`), order as the floats do. Each round counts, among the scores
    whose leading bits are those of the answer so far, the next `DIGIT` bits, and adds up what all processes counted.

    >>> scores = np.array([[3.0, 1.0, 2.0]], np.float32)
    >>> kth_largest({"": lambda: [scores]}, {"": 2}, 1)[""].tolist()
    [2.0]
    """
    kind, done = np.dtype(kind), 0
    width = kind.itemsize * 8
    want = {name: np.broadcast_to(np.asarray(k[name], np.int64), (tasks,)).copy() for name in streams}
    prefix = {name: np.zeros(tasks, np.uint64) for name in streams}
    while done < width:
        bits = min(DIGIT, width - done)
        done += bits
        every = exchange({name: _counted(stream, prefix[name], width - done, bits, kind)
                          for name, stream in streams.items()})
        for name in streams:
            _narrow(functools.reduce(np.add, [one[name] for one in every]), want[name], prefix[name], bits)
    return {name: _unordered(found, kind) for name, found in prefix.items()}


def _counted(stream, prefix, shift: int, bits: int, kind: np.dtype) -> np.ndarray:
    """(tasks, 2**bits): how many scores with each next digit, among those that begin as the answer does."""
    counts, whole = np.zeros((len(prefix), 1 << bits), np.int64), shift + bits == 8 * kind.itemsize
    for part in stream():
        keys = _ordered(part.astype(kind, copy=False)) >> shift
        for t, row in enumerate(keys):
            row = row if whole else row[row >> bits == prefix[t]] & ((1 << bits) - 1)
            counts[t] += np.bincount(row, minlength=1 << bits)
    return counts


def _narrow(counts: np.ndarray, want: np.ndarray, prefix: np.ndarray, bits: int) -> None:
    """Adds the digit in which the answer lies, and takes off those that are larger."""
    for t, row in enumerate(counts):
        larger = np.concatenate([np.cumsum(row[::-1])[::-1][1:], [0]])  # how many have a larger digit
        digit = int(np.flatnonzero((larger < want[t]) & (larger + row >= want[t]))[0])
        want[t] -= larger[digit]
        prefix[t] = (int(prefix[t]) << bits) | digit


def _ordered(x: np.ndarray) -> np.ndarray:
    """Unsigned integers that order as floats do."""
    kind = np.dtype(f"u{x.dtype.itemsize}")
    bits, sign = np.ascontiguousarray(x).view(kind), kind.type(1 << (8 * kind.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def _unordered(keys: np.ndarray, kind: np.dtype) -> np.ndarray:
    width = kind.itemsize * 8
    sign, most = np.uint64(1 << (width - 1)), np.uint64((1 << width) - 1)
    bits = np.where(keys & sign, keys ^ sign, ~keys & most)
    return bits.astype(f"u{kind.itemsize}").view(kind)
