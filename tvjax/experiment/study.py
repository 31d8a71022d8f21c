"""What all studies share: the frame of a run, task vectors taken over from another run, and the two anchors.

A study is a module of this package with `plan(config)`, which checks everything and computes nothing, and
`run(config, folder, say=)`, which leaves rows; `tvjax.reports` has a module of the same name that draws them.
"""
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tvjax import evaluation, sharding, vectors
from tvjax.experiment import finetune, merges, planning, rows, sharing, workdir
from tvjax.experiment import progress as told
from tvjax.experiment.loading import Problem, problem
from tvjax.experiment.planning import Plan

SPLITS = ("val", "test")


class Bench(NamedTuple):
    """What judging needs: the problem, the usual plan, the file of what was measured, the seed, where to report.

    `todo` is the study's own plan.
    """

    about: Problem
    usual: Plan
    cache: pathlib.Path
    seed: int
    say: Callable[[str], None]
    todo: Any = None

    def measure(self, theta, tasks, split: str) -> dict[str, float]:
        """{task: accuracy} of one model, from the cache where it is there."""
        return merges.measure(self.about, self.usual, theta, tasks, split, cache=self.cache)

    def common(self, tasks) -> dict[str, Any]:
        """The fields that the rows on these tasks share."""
        return rows.common(self.usual, tasks, self.seed)


def run(config: Any, usual: Plan, folder, seed_rows: Callable[[Problem, int, Callable[[str], None]], list[dict]], *,
        say: Callable[[str], None] = print, shared_rows: Callable[[Problem, list[dict]], list[dict]] | None = None
        ) -> list[dict]:
    """The frame: checks the folder's owner, loads the problem, calls `seed_rows(problem, seed, say)` for every seed.

    shared_rows: (problem, all rows so far) -> rows that belong to no seed. Writes config.json and results.jsonl, with
    what the run took as its last rows, and returns the rows: of several processes the first, the others none.
    """
    sharing.check_layout(usual)
    folder, plain = pathlib.Path(folder), planning.plain(config)
    begun = time.perf_counter()
    timed = lambda text: say(f"[{time.perf_counter() - begun:6.0f} s] {text}")
    with evaluation.meter() as cost:
        begin = lambda: workdir.write_text(folder / "config.json", json.dumps(plain, indent=2) + "\n")
        about = sharing.owned(folder, plain, lambda: problem(usual), begin)
        sharing.laid_out(about.theta0, timed)
        parts = (lambda seed=seed: seed_rows(about, seed, timed) for seed in told.counted(usual.seeds, timed, "seeds"))
        found = list(sharing.until_done(parts))
        if sharing.at_end():
            return []
        found += shared_rows(about, found) if shared_rows else []
    found += cost_rows(usual, cost)
    sharing.write_rows(about, folder, found)
    return found if sharing.first() else []


def cost_rows(usual: Plan, cost: evaluation.Cost) -> list[dict]:
    """What the run took; of the second run in a folder, what was left to do."""
    shared = {"method": "all", "task": rows.AVERAGE, "split": "none",
              **rows.common(usual, usual.tasks, usual.seeds[0])}
    return [{"metric": "seconds", "value": cost.seconds, **shared, "what": "whole run"},
            {"metric": "peak bytes", "value": cost.peak_bytes, **shared, "what": cost.where}]


def task_vectors(bench: Bench, folder, *, theirs: str = "", progress: bool | None = None) -> dict[str, Any]:
    """{task: τ} of standard fine-tuning, taken over from the run in `theirs` where recipe, data and base agree.

    Several processes share the tasks (`sharing.each`).
    """
    return sharing.each(bench.usual.tasks,
                        lambda task: vector(bench, task, folder, theirs=theirs, progress=progress))


def vector(bench: Bench, task: str, folder, *, theirs: str = "", progress: bool | None = None):
    """τ of one task: reused, taken over, or fine-tuned now."""
    mine, other = (finetune.vector_path(place, task, bench.seed) for place in (folder, theirs or folder))
    take_over(mine, other)
    one = finetune.finetune(bench.about, bench.usual, task, seed=bench.seed, workdir=folder, progress=progress)
    if one.note:
        bench.say(f"warning: {one.note}")
    how = "reused" if one.reused else f"fine-tuned in {one.seconds:.0f} s"
    bench.say(f"{task}, seed {bench.seed}: task vector {how}")
    return one.tau


def take_over(mine: pathlib.Path, other: pathlib.Path) -> None:
    """The task vector `other` with what stands beside it as `mine`, where there is none yet."""
    sharding.once(lambda: _take_over(mine, other))


def _take_over(mine: pathlib.Path, other: pathlib.Path) -> None:
    if not mine.exists() and other.exists() and other.with_suffix(".json").exists():
        mine.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".json", ".safetensors"):
            _link(other.with_suffix(suffix), mine.with_suffix(suffix))


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    """The same file in two folders (files are replaced, never changed), or a copy where links are not to be had."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def anchors(bench: Bench, taus) -> dict[str, dict]:
    """{"zero-shot" and "fine-tuned": {split: {task: accuracy}}}."""
    theta0, tasks = bench.about.theta0, list(taus)
    single = lambda task, split: bench.measure(vectors.add(theta0, taus[task]), [task], split)[task]
    found = {"zero-shot": {split: bench.measure(theta0, tasks, split) for split in SPLITS},
             "fine-tuned": {split: {task: single(task, split) for task in tasks} for split in SPLITS}}
    bench.say(f"seed {bench.seed}: zero-shot {100 * evaluation.absolute(found['zero-shot']['test']):.1f} %, "
              f"fine-tuned {100 * evaluation.absolute(found['fine-tuned']['test']):.1f} %")
    return found


def check_vectors(folder: str) -> str:
    """The `vectors` field of a config: "" or a folder that exists."""
    if folder and not os.path.isdir(folder):
        raise ValueError(f"vectors: there is no folder {folder}")
    return folder
