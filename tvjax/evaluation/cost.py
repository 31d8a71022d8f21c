"""What a block of code cost: wall seconds and peak memory, of the devices where they tell, else of the process."""
import contextlib
import dataclasses
import sys
import time

import jax


@dataclasses.dataclass
class Cost:
    """Filled when the block of `meter` ends.

    `peak_bytes` is the highest use since the process began, the largest over devices; `raised_bytes` is by how much
    this block raised it: 0 means that the block stayed below an earlier peak. `where` is "device" or "process".
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    raised_bytes: int = 0
    where: str = ""


@contextlib.contextmanager
def meter():
    """Measures its block, and waits for the devices at the end of it.

    >>> with meter() as cost:
    ...     _ = jax.numpy.ones(10).sum()
    >>> cost.seconds > 0, cost.peak_bytes > 0
    (True, True)
    """
    cost = Cost()
    _finish()
    before, cost.where = _peak()
    begun = time.perf_counter()
    try:
        yield cost
    finally:
        _finish()
        cost.seconds = time.perf_counter() - begun
        cost.peak_bytes, _ = _peak()
        cost.raised_bytes = cost.peak_bytes - before


def _finish():
    """Waits until every array that is being computed is there."""
    jax.block_until_ready(jax.live_arrays())


def _peak():
    """(bytes, "device" or "process")."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return (max(peaks), "device") if peaks else (_process_peak(), "process")


def _process_peak():
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes
