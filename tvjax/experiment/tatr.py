"""Task arithmetic in a trust region (arXiv:2501.15065): merges with and without it, its ablations, and its kin.

For every seed: each base merge alone, behind the trust region of exemplar gradients, and behind the zero-shot region;
then ablations on the sum of task vectors, and Fisher merging and RegMean, which use as little data. Gradients are taken
at the pretrained model, once for all seeds.
"""
import pathlib
from collections.abc import Callable
from typing import Any

from tvjax.experiment import study, tatr_studies
from tvjax.experiment.tatr_plan import tatr_plan as plan
from tvjax.experiment.tatr_suite import Regions, main_rows, statistics_rows

__all__ = ["plan", "run"]


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole job in `folder` and returns its rows, which are then in `folder`/results.jsonl."""
    todo, folder = plan(config), pathlib.Path(folder)
    return study.run(config, todo.usual, folder, say=say, seed_rows=lambda about, seed, timed: _seed(
        about, todo, seed, folder, timed, progress))


def _seed(about, todo, seed, folder, say, progress) -> list[dict]:
    bench = study.Bench(about, todo.usual, folder / "cache" / f"seed{seed}.jsonl", seed, say, todo)
    taus = study.task_vectors(bench, folder, theirs=todo.vectors, progress=progress)
    anchors = study.anchors(bench, taus)
    found = []
    for count in todo.usual.counts:
        tasks = todo.usual.tasks[:count]
        some = {task: taus[task] for task in tasks}
        own = {name: {split: {task: by[task] for task in tasks} for split, by in splits.items()}
               for name, splits in anchors.items()}
        regions = Regions(bench, folder / "gradients", tasks)
        found += main_rows(bench, regions, some, own)
        found += statistics_rows(bench, some, own)
        if count == max(todo.usual.counts):
            found += tatr_studies.all_rows(bench, regions, some, own)
    return found
