"""A run whose tasks several processes share: each does its own by rank, and finds what the others did in the folder.

What a process leaves there is whole or not there (task vectors are replaced, lines of the cache appended under a lock),
so that nothing is done twice, in this run or the next. Process 0 writes the rows.
"""
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from tvjax import sharding
from tvjax.experiment import workdir


class Done(Exception):
    """A process but the first has done its share; what follows is the first one's."""


def share(items: Iterable[Any]) -> list[Any]:
    """What of the items is this process's to do: every so-many-th, from its own rank on."""
    return list(items)[jax.process_index()::jax.process_count()]


def first() -> bool:
    """Whether this process writes what all have found."""
    return jax.process_index() == 0


def each(tasks: Iterable[str], do: Callable[[str], Any]) -> dict[str, Any]:
    """{task: do(task)}; `do` keeps what it makes in the folder, and takes what is there.

    Of several processes each does its share first, and the first one reads the rest once all are done; in the others
    `Done` is raised.
    """
    tasks = list(tasks)
    if jax.process_count() > 1:
        for task in share(tasks):
            do(task)
        sharding.barrier("tasks")
        if not first():
            raise Done
    return {task: do(task) for task in tasks}


def until_done(parts: Iterable[Callable[[], list[dict]]]) -> Iterator[dict]:
    """The rows of all parts; none in a process that has done its share of each."""
    for part in parts:
        try:
            yield from part()
        except Done:
            continue


def owned(folder, config: dict, load: Callable[[], Any], begin: Callable[[], Any]) -> Any:
    """What `load` gives, the folder being this config's: checked before, and begun (`begin`) by the first process."""
    if first():
        workdir.check_owner(folder, config)
    about = load()
    if first():
        begin()
    sharding.barrier("folder")
    if not first():
        workdir.check_owner(folder, config)
    return about


def check_layout(plan: Any) -> None:
    """Raises ValueError for a mesh over several processes, which these jobs have no use for, and for batches of a plan
    that cannot be cut over the mesh."""
    layout = sharding.found()
    if layout is None:
        return
    if len(layout.processes) > 1:
        raise ValueError("this job spreads its tasks over processes, each with a mesh of its own: choose mesh.data × "
                         f"mesh.model of at most {jax.local_device_count()}, the devices of one process, not "
                         f"{layout.mesh.size}")
    recipe = plan.recipe(0)
    sharding.check_batch(recipe.batch // recipe.accumulation, layout, "finetune.batch, in its parts,")
    sharding.check_batch(plan.batch, layout, "batch, that of evaluation,")


def laid_out(theta0: Any, say: Callable[[str], Any]) -> None:
    """Checks the rules of the layout against the parameters, and says what it does."""
    layout = sharding.found()
    if layout is not None:
        sharding.check(theta0, layout)
        say(sharding.told(layout, theta0))
