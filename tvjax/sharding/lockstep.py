"""One run by several processes on one mesh: all take the same steps, so what is found and written is so by the first.

A file that only one process has seen yet, or a line that came meanwhile, would send the processes different ways, and
the next collective would wait for ever.
"""
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

from tvjax.sharding import meshes, processes

_numbers = itertools.count()


def together() -> bool:
    """Whether the layout of `on` spans several processes, which then all do the same."""
    layout = meshes.found()
    return layout is not None and len(layout.processes) > 1


def decided(find: Callable[[], Any]) -> Any:
    """What `find` gives: of processes in lockstep what it gives the first, as JSON holds it. It is not nested.

    >>> decided(lambda: {"key": 1})
    {'key': 1}
    """
    if not together():
        return find()
    key = f"tvjax/decided/{next(_numbers)}"
    if jax.process_index() == 0:
        found = json.dumps(find())
        processes.client().key_value_set(key, found)
        return json.loads(found)
    return json.loads(processes.client().blocking_key_value_get(key, processes.AGES))


def once(do: Callable[[], Any]) -> None:
    """Does it; of processes in lockstep the first does, and the others wait until it is done."""
    if not together() or jax.process_index() == 0:
        do()
    if together():
        processes.barrier("once")
