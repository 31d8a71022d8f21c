"""TaLoS (arXiv:2504.02620): masks of what a task hardly feels, sparse fine-tuning on them, addition and negation.

For every seed: all ways of fine-tuning of the plan, alone, merged and negated; a sweep over the sparsity, whose best
is that with the lowest validation accuracy on the negated task; the analyses. Task vectors, masks and accuracies are
kept, so that an interrupted run goes on.
"""
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from tvjax import evaluation
from tvjax.experiment import negation, rows, study
from tvjax.experiment.study import Bench
from tvjax.experiment.talos_plan import plan
from tvjax.experiment.talos_rates import choose
from tvjax.experiment.talos_studies import studies
from tvjax.experiment.talos_suite import adamerging_rows, addition_rows, negated, single_rows, way

__all__ = ["plan", "run"]


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole job in `folder` and returns its rows, which are then in `folder`/results.jsonl."""
    todo, folder = plan(config), pathlib.Path(folder)
    return study.run(config, todo.usual, folder, say=say, seed_rows=lambda about, seed, timed: _seed(
        Bench(about, todo.usual, folder / "cache" / f"seed{seed}.jsonl", seed, timed, todo), folder, progress))


def _seed(bench: Bench, folder, progress) -> list[dict]:
    todo, tasks, ways = bench.todo, bench.usual.tasks, {}
    study.task_vectors(bench, folder, theirs=todo.vectors, progress=progress)
    found = negation.zero_shot_rows(bench, tasks)
    for tuning in todo.methods:
        if bench.seed not in tuning.seeds:
            continue
        tuning, tried = choose(bench, tuning, folder, progress)
        one = ways[tuning.label] = way(bench, tuning, folder, progress)
        found += tried
        found += single_rows(bench, one) + addition_rows(bench, one)
        found += negation.negation_rows(bench.common(tasks), tuning.label, negated(bench, one), tuning=tuning.label)
        if tuning.label in todo.adamerging["methods"] and bench.seed in todo.adamerging["seeds"]:
            found += adamerging_rows(bench, one)
    if todo.sparsities and bench.seed in todo.sweep_seeds:
        found += _sweep(bench, ways, folder, progress)
    return found + (studies(bench, ways) if bench.seed in todo.study_seeds else [])


def _sweep(bench: Bench, ways, folder, progress) -> list[dict]:
    """TaLoS over its sparsity: alone, added by the plan's first merge, negated; 0 % is full fine-tuning."""
    todo, tasks, found, judged = bench.todo, bench.usual.tasks, [], {}
    full = [(0.0, one.tuning) for one in ways.values() if one.tuning.name == "full"]
    rate = next((one.tuning.lr for one in ways.values() if one.tuning.name == "talos"), None)
    for sparsity, tuning in [*full, *((sparsity, todo.at(sparsity)) for sparsity in todo.sparsities)]:
        tuning = dataclasses.replace(tuning, lr=rate, rates=())
        one = ways.get(tuning.label) or way(bench, tuning, folder, progress)
        away = negated(bench, one)
        judged[sparsity] = negation.average(away, "target", "val")
        more = {"section": "sweep", "sparsity": sparsity}
        added = [row for row in addition_rows(bench, one, bench.usual.merges[:1])
                 if row["metric"] != "trace" and row["task"] == rows.AVERAGE]
        found += [{**row, **more} for row in added]
        base = {"method": tuning.label, "task": rows.AVERAGE, **bench.common(tasks), **more}
        for split in study.SPLITS:
            found += [{"metric": metric, "value": negation.average(away, metric, split), "split": split, **base}
                      for metric in ("target", "control")]
            found.append({"metric": "single accuracy", "value": evaluation.absolute(one.single[split]), "split": split,
                          **base})
    best = min(todo.sparsities, key=lambda sparsity: judged[sparsity])
    return [*found, {"metric": "chosen sparsity", "value": best, "method": "talos", "task": rows.AVERAGE,
                     "split": "val", "section": "sweep", **bench.common(tasks)}]
