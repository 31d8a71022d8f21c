"""The exact k-th largest score of a stream, without sorting or holding it.

A sample brackets the answer, one pass counts above the bracket and collects the few scores inside it, and the answer is
selected among those. A bracket that misses is widened.
"""
from collections.abc import Callable, Iterator

import numpy as np

SMALL = 1 << 22  # scores (of all tasks) that are simply held and partitioned
EVERY = 61  # one score in at least so many is sampled; a prime, so that it does not follow the columns of a matrix


def kth_largest(scores: Callable[[], Iterator[np.ndarray]], k, entries: int, *, sample=None) -> np.ndarray:
    """Per task, the k-th largest of a stream of (tasks, some) arrays.

    scores: starts the stream anew at each call. k: an integer or one for each task. sample: every -> a thinner stream
    of the same scores.
    """
    if entries <= SMALL // 4:
        held = np.concatenate(list(scores()), 1)
        return np.stack([_select(row, int(n)) for row, n in zip(held, np.broadcast_to(k, len(held)), strict=True)])
    every = stride(entries)
    thin = sample(every) if sample else (part[:, ::every] for part in scores())
    drawn = np.sort(np.concatenate(list(thin), 1), 1)[:, ::-1]
    k = np.broadcast_to(np.asarray(k), (len(drawn),))
    for spread in (5.0, 50.0, np.inf):
        low, high = _bracket(drawn, k / entries, spread)
        above, inside = _collect(scores(), low, high)
        if all(n < want <= n + len(found) for n, want, found in zip(above, k, inside, strict=True)):
            break
    # An infinite bracket holds every score but NaN, which counts as the largest.
    pick = lambda n, want, found: _select(found, int(want - n)) if n < want else np.nan
    return np.array([pick(n, want, found) for n, want, found in zip(above, k, inside, strict=True)], drawn.dtype)


def stride(entries: int) -> int:
    """One of how many scores is sampled: few enough samples to hold, of the largest models too.

    >>> stride(1 << 20), stride(7 << 30)
    (61, 1801)
    """
    every = max(EVERY, entries >> 22)
    while any(every % n == 0 for n in range(2, int(every**0.5) + 1)):
        every += 1
    return every


def _bracket(drawn: np.ndarray, share: np.ndarray, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Per task, two sampled scores around the answer, `spread` standard errors from its rank in the sample."""
    n = drawn.shape[1]
    error = spread * np.sqrt(n * share * (1 - share) + 1) + 2
    first, last = share * n - error, share * n + error
    place = lambda ranks: np.clip(np.nan_to_num(ranks, posinf=n, neginf=0), 0, n - 1).astype(int)
    pick = lambda ranks: drawn[np.arange(len(drawn)), place(ranks)]
    low, high = np.where(last < n - 1, pick(last), -np.inf), np.where(first > 0, pick(first), np.inf)
    return low.astype(drawn.dtype), high.astype(drawn.dtype)


def _collect(stream: Iterator[np.ndarray], low: np.ndarray, high: np.ndarray):
    """Per task, how many scores exceed `high`, and those in [low, high]."""
    above = np.zeros(len(low), np.int64)
    inside: list[list[np.ndarray]] = [[] for _ in low]
    for part in stream:
        for t, row in enumerate(part):
            below = row <= high[t]
            above[t] += row.size - np.count_nonzero(below)
            inside[t].append(row[np.flatnonzero(below & (row >= low[t]))])
    return above, [np.concatenate(found) for found in inside]


def _select(row: np.ndarray, k: int) -> np.floating:
    return np.partition(row, len(row) - k)[len(row) - k]
