"""How far a long job is and how long it still takes, as lines of its log."""
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def counted(items: Iterable[Any], say: Callable[[str], Any], what: str) -> Iterator[Any]:
    """The items; after each but the last, `say` is told how many are done and about how long the others take.

    The guess is that each takes as long as those before did on average.

    >>> list(counted("ab", print, "tasks"))
    1 of 2 tasks done; about 0 s left for the others
    ['a', 'b']
    """
    items, begun = list(items), time.perf_counter()
    for done, item in enumerate(items, 1):
        yield item
        if rest := len(items) - done:
            each = (time.perf_counter() - begun) / done
            say(f"{done} of {len(items)} {what} done; about {duration(rest * each)} left for the others")


def duration(seconds: float | int) -> str:
    """Seconds in words.

    >>> duration(42.4), duration(150), duration(5400)
    ('42 s', '2.5 min', '1.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"
