"""Localise, compress, switch (arXiv:2405.07813): masks on merged vectors, Consensus and codecs, judged by one protocol.

For every seed and number of tasks: merges of the plan, for every base TALL-masks (λ of a task chosen on its validation
split), their agreement, Consensus over k, the codecs, all with bits beside accuracies. Whatever was measured is kept,
so that an interrupted run goes on.
"""
import pathlib
from collections.abc import Callable
from typing import Any

from tvjax.experiment import adapted, study
from tvjax.experiment.tall_plan import tall_plan as plan
from tvjax.experiment.tall_studies import control, curve
from tvjax.experiment.tall_suite import Bench, suite

__all__ = ["plan", "run"]


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole job in `folder` and returns its rows, which are then in `folder`/results.jsonl."""
    todo, folder = plan(config), pathlib.Path(folder)
    return study.run(config, todo.usual, folder, say=say, seed_rows=lambda about, seed, timed: _seed(
        about, todo, seed, folder, timed, progress))


def _seed(about, todo, seed, folder, say, progress) -> list[dict]:
    usual, cache = todo.usual, folder / "cache" / f"seed{seed}"
    about = about if todo.adapter is None else adapted.beside(about, todo.adapter, seed=seed)
    bench = lambda name: Bench(about, usual, cache / f"{name}.jsonl", seed, say, todo)
    taus = _task_vectors(bench("anchors"), folder, progress)
    anchors = study.anchors(bench("anchors"), taus)
    found = []
    for count in usual.counts:
        found += suite(bench(f"{count}-tasks"), usual.tasks[:count], taus, anchors)
    for count in todo.nonoverlap:
        found += control(bench(f"nonoverlap-{count}"), usual.tasks[:count], taus, anchors,
                         folder / f"nonoverlap-{count}", progress)
    if seed in todo.curve_seeds:
        for name in todo.curve_orders:
            found += curve(bench(f"curve-{name.replace(' ', '-')}"), name, taus, anchors)
    return found


def _task_vectors(bench: Bench, folder, progress) -> dict[str, Any]:
    """{task: τ} of the weights, or of the adapter of the plan."""
    if bench.todo.adapter is None:
        return study.task_vectors(bench, folder, theirs=bench.todo.vectors, progress=progress)
    return adapted.task_vectors(bench, bench.todo.adapter, folder, progress=progress)
