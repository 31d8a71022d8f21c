"""Learned anisotropic scaling (aTLAS, arXiv:2407.02880): addition, negation, few shots, adaptation, and their kin.

For every seed the task vectors are made or taken over, then the studies that the config names: each learns coefficients
on task vectors and the baselines beside them under one protocol, and leaves rows with `part` set.
"""
import importlib
import pathlib
from collections.abc import Callable
from typing import Any

from tvjax.experiment import study
from tvjax.experiment.atlas_plan import AtlasPlan
from tvjax.experiment.atlas_plan import atlas_plan as plan

__all__ = ["plan", "run"]

MODULES = {"addition": "atlas_addition", "negation": "atlas_negation", "fewshot": "atlas_fewshot",
           "contribution": "atlas_fewshot", "tta": "atlas_tta", "peft": "atlas_peft", "selection": "atlas_selection",
           "basis": "atlas_selection"}


def run(config: Any, folder, *, say: Callable[[str], None] = print, progress: bool | None = None) -> list[dict]:
    """Does the whole job in `folder` and returns its rows, which are then in `folder`/results.jsonl."""
    todo, folder = plan(config), pathlib.Path(folder)
    return study.run(config, todo.usual, folder, say=say, seed_rows=lambda about, seed, timed: _seed(
        about, todo, seed, folder, timed, progress))


def _seed(about, todo: AtlasPlan, seed: int, folder, say, progress) -> list[dict]:
    bench = study.Bench(about, todo.usual, folder / "cache" / f"seed{seed}.jsonl", seed, say, todo)
    taus = study.task_vectors(bench, folder, theirs=todo.vectors, progress=progress)
    anchors = study.anchors(bench, taus)
    found = []
    for part in todo.parts:
        module = importlib.import_module(f"tvjax.experiment.{MODULES[part]}")
        found += getattr(module, part)(bench, taus, anchors, folder)
    return found
