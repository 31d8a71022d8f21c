"""Localise, compress, switch (arXiv:2405.07813): masks on merged vectors, Consensus and codecs, judged by one protocol.

For every seed and number of tasks: merges of the plan, for every base TALL-masks (λ of a task chosen on its validation
split), their agreement, Consensus over k, the codecs, all with bits beside accuracies. Whatever was measured is kept,
so that an interrupted run goes on.
"""
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

from tvjax import evaluation, vectors
from tvjax.experiment import finetune, planning, rows, workdir
from tvjax.experiment.loading import problem
from tvjax.experiment.tall_plan import tall_plan
from tvjax.experiment.tall_studies import control, curve
from tvjax.experiment.tall_suite import SPLITS, Bench, suite


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole job in `folder` and returns its rows, which are then in `folder`/results.jsonl."""
    todo, folder = tall_plan(config), pathlib.Path(folder)
    workdir.check_owner(folder, planning.plain(config))
    begun = time.perf_counter()
    timed = lambda text: say(f"[{time.perf_counter() - begun:6.0f} s] {text}")
    with evaluation.meter() as cost:
        about = problem(todo.usual)
        workdir.write_text(folder / "config.json", json.dumps(planning.plain(config), indent=2) + "\n")
        found = [row for seed in todo.usual.seeds for row in _seed(about, todo, seed, folder, timed, progress)]
    shared = {"method": "all", "task": rows.AVERAGE, "split": "none",
              **rows.common(todo.usual, todo.usual.tasks, todo.usual.seeds[0])}
    found += [{"metric": "seconds", "value": cost.seconds, **shared, "what": "whole run"},
              {"metric": "peak bytes", "value": cost.peak_bytes, **shared, "what": cost.where}]
    workdir.write_rows(folder / "results.jsonl", found, base=about.base, data=evaluation.content_key(about.keys))
    return found


def _seed(about, todo, seed, folder, say, progress) -> list[dict]:
    usual, cache = todo.usual, folder / "cache" / f"seed{seed}"
    taus = {task: _vector(about, todo, task, seed, folder, say, progress) for task in usual.tasks}
    anchors = _anchors(Bench(about, todo, cache / "anchors.jsonl", seed, say), taus)
    found = []
    for count in usual.counts:
        bench = Bench(about, todo, cache / f"{count}-tasks.jsonl", seed, say)
        found += suite(bench, usual.tasks[:count], taus, anchors)
    for count in todo.nonoverlap:
        bench = Bench(about, todo, cache / f"nonoverlap-{count}.jsonl", seed, say)
        found += control(bench, usual.tasks[:count], taus, anchors, folder / f"nonoverlap-{count}", progress)
    if seed in todo.curve_seeds:
        for name in todo.curve_orders:
            bench = Bench(about, todo, cache / f"curve-{name.replace(' ', '-')}.jsonl", seed, say)
            found += curve(bench, name, taus, anchors)
    return found


def _vector(about, todo, task, seed, folder, say, progress):
    """τ of a task; taken over from the run that the config names, where recipe, data and base are the same."""
    mine, theirs = (finetune.vector_path(place, task, seed) for place in (folder, todo.vectors or folder))
    if not mine.exists() and theirs.exists() and theirs.with_suffix(".json").exists():
        mine.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".json", ".safetensors"):
            _link(theirs.with_suffix(suffix), mine.with_suffix(suffix))
    one = finetune.finetune(about, todo.usual, task, seed=seed, workdir=folder, progress=progress)
    if one.note:
        say(f"warning: {one.note}")
    how = "reused" if one.reused else f"fine-tuned in {one.seconds:.0f} s"
    say(f"{task}, seed {seed}: task vector {how}")
    return one.tau


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    """The same file in two folders (files are replaced, never changed), or a copy where links are not to be had."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _anchors(bench: Bench, taus) -> dict[str, dict]:
    """{"zero-shot" and "fine-tuned": {split: {task: accuracy}}}."""
    theta0, tasks = bench.about.theta0, list(taus)
    single = lambda task, split: bench.measure(vectors.add(theta0, taus[task]), [task], split)[task]
    found = {"zero-shot": {split: bench.measure(theta0, tasks, split) for split in SPLITS},
             "fine-tuned": {split: {task: single(task, split) for task in tasks} for split in SPLITS}}
    bench.say(f"seed {bench.seed}: zero-shot {100 * evaluation.absolute(found['zero-shot']['test']):.1f} %, "
              f"fine-tuned {100 * evaluation.absolute(found['fine-tuned']['test']):.1f} %")
    return found
