"""A run by several processes: each does its tasks by rank and finds what the others did in the folder, or, where the
mesh spans them, all do every task together, in lockstep.

What a process leaves there is whole or not there (task vectors are replaced, lines of the cache appended under a lock),
so that nothing is done twice, in this run or the next. Process 0 writes the rows.
"""
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from tvjax import evaluation, sharding
from tvjax.experiment import workdir


class Done(Exception):
    """A process but the first has done its share; what follows is the first one's."""


def by_rank() -> bool:
    """Whether several processes share the tasks, each with its own devices."""
    return jax.process_count() > 1 and not sharding.together()


def share(items: Iterable[Any]) -> list[Any]:
    """What of the items is this process's to do: every so-many-th, from its own rank on."""
    return list(items)[jax.process_index()::jax.process_count()]


def first() -> bool:
    """Whether this process writes what all have found."""
    return jax.process_index() == 0


def at_end() -> bool:
    """Whether this process has no more to do once its share of the tasks is done."""
    return by_rank() and not first()


def each(tasks: Iterable[str], do: Callable[[str], Any]) -> dict[str, Any]:
    """{task: do(task)}; `do` keeps what it makes in the folder, and takes what is there.

    Of several processes each does its share first, and the first one reads the rest once all are done; in the others
    `Done` is raised.
    """
    tasks = list(tasks)
    if by_rank():
        for task in share(tasks):
            do(task)
        sharding.barrier("tasks")
    if at_end():
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
    """Raises ValueError for batches of a plan that cannot be cut over the mesh."""
    layout = sharding.found()
    if layout is None:
        return
    recipe = plan.recipe(0)
    sharding.check_batch(recipe.batch // recipe.accumulation, layout, "finetune.batch, in its parts,")
    sharding.check_batch(plan.batch, layout, "batch, that of evaluation,")


def laid_out(theta0: Any, say: Callable[[str], Any]) -> None:
    """Checks the rules of the layout against the parameters, and says what it does."""
    layout = sharding.found()
    if layout is not None:
        sharding.check(theta0, layout)
        say(sharding.told(layout, theta0))


def write_rows(about: Any, folder, found: list[dict]) -> None:
    """The rows of a whole run on a problem, by one process."""
    hashes = {"base": about.base, "data": evaluation.content_key(about.keys)}
    sharding.once(lambda: workdir.write_rows(folder / "results.jsonl", found, **hashes))
