"""The exact k-th largest score of a stream, without sorting or holding it.

A sample brackets the answer, one pass counts above the bracket and collects the few scores inside it, and the answer is
selected among those. A bracket that misses is widened.
"""
from collections.abc import Callable, Iterator

import numpy as np

SMALL = 1 << 22  # scores (of all tasks) that are simply held and partitioned
EVERY = 101  # one score in at least so many is sampled; a prime, so that it does not follow the columns of a matrix
RUN = 1 << 10  # scores that follow each other in a sample: a page of a file


class Tally:
    """Scores of one task; where many of them are equal, with how often each came."""

    def __init__(self):
        self.values: list[np.ndarray] = []
        self.counts: list[np.ndarray] = []
        self.held, self.total, self.packed = 0, 0, 0

    def add(self, scores: np.ndarray, times: np.ndarray | None = None) -> None:
        times = np.ones(len(scores), np.uint8) if times is None else times
        self.values.append(scores)
        self.counts.append(times)
        self.held += len(scores)
        self.total += int(times.sum(dtype=np.int64))
        if self.held > max(SMALL, 2 * self.packed):
            self._pack()

    def _pack(self) -> None:
        values, where = np.unique(np.concatenate(self.values), return_inverse=True)
        counts = np.bincount(where, np.concatenate(self.counts), len(values)).astype(np.int64)
        self.values, self.counts, self.held, self.packed = [values], [counts], len(values), len(values)

    def largest(self, k: int) -> np.floating:
        """The k-th largest, k within 1 … total."""
        values = np.concatenate(self.values)
        if self.total == len(values):
            return _select(values, k)
        order = np.argsort(values)[::-1]
        return values[order][np.searchsorted(np.cumsum(np.concatenate(self.counts)[order], dtype=np.int64), k)]


def kth_largest(scores: Callable[[], Iterator[np.ndarray]], k, entries: int, *, sample=None,
                collect=None) -> np.ndarray:
    """Per task, the k-th largest of a stream of (tasks, some) arrays.

    scores: starts the stream anew at each call. k: an integer or one for each task. sample: every -> a thinner stream
    of the same scores. collect: what counts and collects, given the brackets, as `collected` does.
    """
    if entries <= SMALL // 4:
        held = np.concatenate(list(scores()), 1)
        return np.stack([_select(row, int(n)) for row, n in zip(held, np.broadcast_to(k, len(held)), strict=True)])
    every = stride(entries)
    thin = sample(every) if sample else (part[:, ::every] for part in scores())
    drawn = np.concatenate(list(thin), 1)
    ordered, k = np.sort(drawn, 1)[:, ::-1], np.broadcast_to(np.asarray(k), (len(drawn),))
    collect = collect or (lambda low, high: collected(scores(), low, high))
    for spread in (4.5, 60.0, np.inf):
        low, high = _bracket(drawn, ordered, k / entries, spread)
        above, inside = collect(low, high)
        if all(n < want <= n + found.total for n, want, found in zip(above, k, inside, strict=True)):
            break
    # An infinite bracket holds every score but NaN, which counts as the largest.
    pick = lambda n, want, found: found.largest(int(want - n)) if n < want else np.nan
    return np.array([pick(n, want, found) for n, want, found in zip(above, k, inside, strict=True)], drawn.dtype)


def stride(entries: int) -> int:
    """One of how many scores is sampled: few enough samples to hold, of the largest models too.

    >>> stride(1 << 20), stride(7 << 30)
    (101, 1801)
    """
    every = max(EVERY, entries >> 22)
    while any(every % n == 0 for n in range(2, int(every**0.5) + 1)):
        every += 1
    return every


def _bracket(drawn, ordered, share: np.ndarray, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Per task, two sampled scores around the answer, `spread` standard errors from its rank in the sample.

    drawn: the sample in the order in which it was read, ordered: from the largest on. Scores that were read together
    may resemble each other, which the differences between runs that follow each other tell.
    """
    n = drawn.shape[1]
    place = lambda ranks: np.clip(np.nan_to_num(ranks, posinf=n, neginf=0), 0, n - 1).astype(int)
    pick = lambda ranks: ordered[np.arange(len(drawn)), place(ranks)]
    variance = np.maximum(n * share * (1 - share) + 1, _between(drawn, pick(share * n)))
    error = spread * np.sqrt(variance) + 2
    first, last = share * n - error, share * n + error
    low, high = np.where(last < n - 1, pick(last), -np.inf), np.where(first > 0, pick(first), np.inf)
    return low.astype(drawn.dtype), high.astype(drawn.dtype)


def _between(drawn: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Per task, the variance of how many sampled scores exceed the guess, from runs that follow each other."""
    runs = drawn.shape[1] // RUN
    if runs < 2:
        return np.zeros(len(drawn))
    counts = np.stack([np.count_nonzero((row[: runs * RUN] > least).reshape(runs, RUN), 1)
                       for row, least in zip(drawn, guess, strict=True)])
    return (np.diff(counts, axis=1) ** 2).sum(1) / 2 * (runs / (runs - 1))


def collected(stream: Iterator[np.ndarray], low: np.ndarray, high: np.ndarray):
    """Per task, how many scores exceed `high`, and a tally of those in [low, high]."""
    above, inside = np.zeros(len(low), np.int64), [Tally() for _ in low]
    for part in stream:
        for t, row in enumerate(part):
            over, _, scores, times = side(row, low[t], high[t])
            above[t] += over
            inside[t].add(scores, times)
    return above, inside


def side(row: np.ndarray, low, high) -> tuple[int, np.ndarray, np.ndarray, np.ndarray | None]:
    """(how many scores exceed `high`; which lie inside; these, and how often each came) for scores of one task."""
    below = row <= high
    over = row.size - int(np.count_nonzero(below))
    within = np.logical_and(below, row >= low, out=below)
    if low != high:
        return over, within, row[np.flatnonzero(within)], None
    times = int(np.count_nonzero(within))  # all that lies inside is this one score
    return over, within, np.array([high] if times else [], row.dtype), np.array([times] if times else [], np.int64)


def _select(row: np.ndarray, k: int) -> np.floating:
    if not len(row):
        return row.dtype.type(0)  # of no scores: nothing is compared with it
    return np.partition(row, len(row) - k)[len(row) - k]
