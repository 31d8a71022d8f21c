"""What is started ahead of its use, and on which threads, so that reading, computing and writing overlap."""
import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import threadpoolctl

AHEAD = 3  # pieces that are read and started ahead of their use
WHOLE = 5 << 20  # entries of a task in whole leaves that are under way at once


def ahead(items: Iterator) -> Iterator:
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


def carried(f: Callable) -> Callable:
    """f for another thread, with this thread's precision and device: these settings of JAX are each thread's own."""
    wide, device = jax.config.jax_enable_x64, jax.config.jax_default_device

    def call(*args):
        with jax.enable_x64(wide), jax.default_device(device):
            return f(*args)
    return call


@functools.cache
def readers() -> ThreadPoolExecutor:
    """The threads that read."""
    return ThreadPoolExecutor(2, "tvjax-read")


@contextlib.contextmanager
def leaf_workers(whole: list[int]) -> Iterator[ThreadPoolExecutor | None]:
    """Where many small matrices (`whole`: their entries) go whole, each is one worker's, and each decomposition has one
    thread: BLAS's own, and two programs that share theirs, would stand in each other's way."""
    count = os.cpu_count() or 1
    if not len(whole) >= count > 1 or 2 * max(whole) > WHOLE or jax.default_backend() != "cpu":
        yield None
        return
    import scipy.linalg.cython_lapack  # noqa: F401 (whose BLAS JAX calls; a limit holds for what is loaded)

    with threadpoolctl.threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(count, "tvjax-leaf") as workers:
        yield workers
