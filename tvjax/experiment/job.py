"""The main job: pretrained model → fine-tuning → task vectors → merges → evaluation → rows, all kept in a folder.

Nothing is written before the config, the folder and the model have been checked. What an earlier run in the same folder
has done is reused: task vectors by hash of recipe, data and base, accuracies by content.
"""
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from tvjax import evaluation, results, sharding, vectors
from tvjax.experiment import merges, rows, sharing, workdir
from tvjax.experiment import progress as told
from tvjax.experiment.finetune import Tuned, finetune
from tvjax.experiment.loading import Problem, problem
from tvjax.experiment.planning import Plan, plain, plan


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole experiment of a config in `folder` and returns its rows, which are then in `folder`/results.jsonl.

    Of several processes each fine-tunes and judges its share of tasks and merges, by rank, or, on a mesh over all of
    them, all do everything together; the first one, which then has all of it, returns the rows, the others none.

    say: takes one line of progress. Raises ValueError with one sentence for a slip in the config, a folder of another
    experiment, a model that does not fit; OSError where the disk fails.
    """
    todo, folder = plan(config), pathlib.Path(folder)
    sharing.check_layout(todo)
    with evaluation.meter() as cost:
        begin = lambda: workdir.write_text(folder / "config.json", json.dumps(plain(config), indent=2) + "\n")
        about = sharing.owned(folder, plain(config), lambda: problem(todo), begin)
        sharing.laid_out(about.theta0, say)
        say(f"{todo.name}: {len(todo.tasks)} tasks, {len(todo.merges)} merges, seeds {todo.seeds}, into {folder}")
        parts = (lambda seed=seed: _seed(about, todo, seed, folder, say, progress)
                 for seed in told.counted(todo.seeds, say, "seeds"))
        found = list(sharing.until_done(parts))
        if sharing.at_end():
            return []
    found += _cost(todo, cost)
    sharing.write_rows(about, folder, found)
    return found if sharing.first() else []


def _seed(about: Problem, todo: Plan, seed: int, folder, say, progress) -> list[dict]:
    tuned = _tuned(about, todo, seed, folder, say, progress)
    shared = rows.common(todo, todo.tasks, seed)
    found = rows.tuning(shared, tuned, np.asarray(vectors.cosines([one.tau for one in tuned.values()])))
    anchors = _anchors(about, todo, tuned, folder / "cache.jsonl")
    for count in todo.counts:
        found += _suite(about, todo, todo.tasks[:count], seed, tuned, anchors, folder, say)
    return found


def _tuned(about, todo, seed, folder, say, progress) -> dict[str, Tuned]:
    """{task: its task vector}. Several processes share fine-tuning and judging, and only the first one goes on."""
    tune = lambda task: _tune(about, todo, task, seed, folder, say, progress)
    if not sharing.by_rank():
        return {task: tune(task) for task in told.counted(todo.tasks, say, "tasks")}
    for task in sharing.share(todo.tasks):
        tune(task)
    sharding.barrier("fine-tuned")
    tuned = {task: tune(task) for task in todo.tasks}
    for task in sharing.share(todo.tasks):
        _anchors(about, todo, {task: tuned[task]}, folder / "cache.jsonl")
    sharding.barrier("anchors")
    whole = _anchors(about, todo, tuned, folder / "cache.jsonl")["fine-tuned"]
    for count, merge in sharing.share([(count, merge) for count in todo.counts for merge in todo.merges]):
        tasks = todo.tasks[:count]
        part = {split: {task: by[task] for task in tasks} for split, by in whole.items()}
        merges.judge(about, todo, merge, tasks, [tuned[task].tau for task in tasks], part, cache=folder / "cache.jsonl")
        say(f"{merge.label}, {count} tasks, seed {seed}: judged")
    sharding.barrier("judged")
    if sharing.at_end():
        raise sharing.Done
    return tuned


def _tune(about, todo, task, seed, folder, say, progress) -> Tuned:
    one = finetune(about, todo, task, seed=seed, workdir=folder, progress=progress)
    if one.note:
        say(f"warning: {one.note}")
    if task in todo.finetuned:
        say(f"{task}: task vector of {todo.finetuned[task]}")
    elif one.reused:
        say(f"{task}, seed {seed}: reused its task vector, recipe, data and base are unchanged")
    else:
        say(f"{task}, seed {seed}: fine-tuned in {one.seconds:.0f} s, {one.rate:.0f} images/s, loss {one.loss:.3f}")
    return one


def _anchors(about, todo, tuned, cache) -> dict[str, dict]:
    """{"zero-shot" and "fine-tuned": {split: {task: accuracy}}}."""
    whole = {task: vectors.add(about.theta0, one.tau) for task, one in tuned.items()}
    single = lambda task, split: merges.measure(about, todo, whole[task], [task], split, cache=cache)[task]
    splits = ("val", "test")
    return {"zero-shot": {s: merges.measure(about, todo, about.theta0, list(tuned), s, cache=cache) for s in splits},
            "fine-tuned": {s: {task: single(task, s) for task in tuned} for s in splits}}


def _suite(about, todo, tasks, seed, tuned, anchors, folder, say) -> list[dict]:
    """Rows of all methods on the first few tasks."""
    shared = rows.common(todo, tasks, seed)
    anchors = {method: {split: {task: by[task] for task in tasks} for split, by in found.items()}
               for method, found in anchors.items()}
    found = [row for method, accuracy in anchors.items()
             for row in rows.accuracies(shared, method, accuracy, anchors["fine-tuned"], data="none")]
    for merge in todo.merges:
        judged = merges.judge(about, todo, merge, tasks, [tuned[task].tau for task in tasks], anchors["fine-tuned"],
                              cache=folder / "cache.jsonl")
        found += rows.merged(shared, merge, judged, anchors["fine-tuned"], split=todo.select_on,
                             data=merges.data_used(merge, todo))
        if todo.save_models and seed == todo.seeds[0]:
            theta = evaluation.moved(about.theta0, judged.tau, judged.scale)
            place = folder / "merged" / f"{len(tasks)}-tasks" / merge.label
            sharding.once(lambda theta=theta, place=place: about.save(theta, place))
        test, whole = judged.accuracy["test"], anchors["fine-tuned"]["test"]
        say(f"{merge.label}, {len(tasks)} tasks, seed {seed}: test {100 * evaluation.absolute(test):.1f} % "
            f"({100 * evaluation.normalised(test, whole):.1f} % normalised) at α = {judged.scale:g}")
    return found


def _cost(todo: Plan, cost: evaluation.Cost) -> list[dict]:
    """What the run took, as rows; of the second run in a folder, what was left to do."""
    shared = {"method": "all", "task": rows.AVERAGE, "split": "none", **rows.common(todo, todo.tasks, todo.seeds[0])}
    return [{"metric": "seconds", "value": cost.seconds, **shared, "what": "whole run"},
            {"metric": "peak bytes", "value": cost.peak_bytes, **shared, "what": cost.where}]


def final_table(found: list[dict], tasks: int) -> results.Table:
    """Methods by their average (normalised) accuracy on the test split of the suite of so many tasks."""
    chosen = results.select(found, split="test", task=rows.AVERAGE, tasks=tasks)
    several = len({row["seed"] for row in chosen}) > 1
    return results.pivot(chosen, columns="metric", reduce=results.mean_std if several else statistics.fmean)
