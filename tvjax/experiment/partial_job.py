"""The frame of the jobs llora and tangent: every way tuned on every task, then fusions and studies, seed by seed."""
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from tvjax import evaluation
from tvjax.experiment import partial_studies, rows, sharing, study, ways
from tvjax.experiment.partial_plan import PartialPlan, partial_plan
from tvjax.experiment.partial_suite import cache_path, fusion_rows, judged, tuning_rows
from tvjax.experiment.way_tuning import slug, tune


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole job in `folder` and returns its rows, which are then in `folder`/results.jsonl."""
    todo, folder = partial_plan(config), pathlib.Path(folder)
    return study.run(config, todo.usual, folder, say=say, seed_rows=lambda about, seed, timed: _seed(
        about, todo, seed, folder, timed, progress))


def _seed(about, todo: PartialPlan, seed: int, folder, say, progress) -> list[dict]:
    bench = lambda plan: study.Bench(about, todo.usual, cache_path(folder, slug(plan.name), seed), seed, say, todo)
    found = list(sharing.until_done(
        lambda plan=plan: _way(bench(plan), ways.build(plan, about, seed), folder, progress) for plan in todo.ways))
    if sharing.at_end():
        raise sharing.Done
    if todo.scaling and seed in todo.scaling["seeds"]:
        found += _scaling(about, todo, seed, folder, say, progress)
    return _zero_shot(about, todo, seed, folder, say) + found


def _way(bench: study.Bench, way: ways.Way, folder, progress) -> list[dict]:
    taus = sharing.each(bench.usual.tasks,
                        lambda task: tune(bench, way, task, folder, theirs=bench.todo.vectors, progress=progress))
    one = judged(bench, way, taus)
    found = tuning_rows(one, taus) + fusion_rows(one) + partial_studies.study_rows(one)
    if one.counts[0] and way.family.slopes:
        bench.say(f"{way.name}: its features are affine in the coefficients, {one.counts[0]} passes of a split in "
                  f"place of {one.counts[1]}")
        found.append({"metric": "passes", "value": one.counts[0], "method": way.name, "task": rows.AVERAGE,
                      "split": "none", **bench.common(list(one.tasks)), "part": "sweep", "plain": one.counts[1]})
    return found


def _zero_shot(about, todo, seed, folder, say) -> list[dict]:
    bench = study.Bench(about, todo.usual, folder / "cache" / f"zero-shot-{seed}.jsonl", seed, say, todo)
    accuracy = bench.measure(about.theta0, todo.usual.tasks, "test")
    values = {**accuracy, rows.AVERAGE: evaluation.absolute(accuracy)}
    return [{"metric": "accuracy", "value": value, "method": "zero-shot", "task": task, "split": "test",
             **bench.common(list(todo.usual.tasks)), "part": "single"} for task, value in values.items()]


def _scaling(about, todo: PartialPlan, seed: int, folder, say, progress) -> list[dict]:
    """How fusion fares with more trained numbers: every adapter way of the plan at every rank, on the first tasks."""
    tasks = todo.usual.tasks[:todo.scaling["tasks"]]
    usual = dataclasses.replace(todo.usual, tasks=tasks, counts=(len(tasks),))
    found = []
    for plan in (one for one in todo.ways if one.kind == "lora" and one.scope != "network"):
        for rank in todo.scaling["ranks"]:
            sized = dataclasses.replace(plan.method, rank=rank, alpha=plan.method.alpha * rank / plan.method.rank)
            at_rank = dataclasses.replace(plan, name=f"{plan.name}, r = {rank}", method=sized)
            small = dataclasses.replace(todo, usual=usual, ways=(at_rank,), sizes=(len(tasks),), most=0, plane={})
            bench = study.Bench(about, usual, cache_path(folder, slug(at_rank.name), seed), seed, say, small)
            way = ways.build(at_rank, about, seed)
            one = judged(bench, way, {task: tune(bench, way, task, folder, progress=progress) for task in tasks})
            more = {"part": "scaling", "way": plan.name, "rank": rank, "trained": way.trained}
            single = {"metric": "accuracy", "value": evaluation.absolute(one.single["test"]), "split": "test",
                      "method": at_rank.name, "task": rows.AVERAGE, **bench.common(list(tasks)), "fusion": "single"}
            found += [{**row, **more} for row in [single, *fusion_rows(one)] if row["task"] == rows.AVERAGE]
    return found


