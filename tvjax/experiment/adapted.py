"""A problem whose trained part is an adapter's φ beside frozen weights, such as (IA)³'s factors, which begin at 1.

The parameters are one tree of the network's weights and φ; a task vector τ = φ_t − φ0 holds the leaves of φ alone, so
that every merge, mask and codec works on it as on any other, and θ0 + τ is the network with the adapters of a task.
"""
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tvjax import adapters, calibration, checkpoints, evaluation, training, tree, vectors
from tvjax.experiment import finetune, sharing, talos_tuning
from tvjax.experiment.loading import Problem
from tvjax.experiment.study import Bench
from tvjax.experiment.ways import sites

NOTHING: dict[str, Any] = {}


def build(given: dict | None) -> adapters.Method | None:
    """The method of a config's group {name, options …}; None where the group is empty."""
    options = dict(given or NOTHING)
    if options.get("name") == "bias":
        raise ValueError("an adapter of biases is called like the network's own biases: tune those alone (bitfit)")
    return adapters.build(str(options.pop("name", "")), options) if options else None


def beside(about: Problem, method: adapters.Method, *, seed: int = 0) -> Problem:
    """The problem with φ0 in its parameters; hashes tell it from the one without."""
    phi0 = jax.device_get(adapters.start(method, sites(about), seed=seed))
    told = [repr(method), str(seed)]
    keys = {task: {split: evaluation.content_key(key, *told) for split, key in by.items()}
            for task, by in about.keys.items()}
    return about._replace(
        theta0=tree.union(about.theta0, phi0), predict=_with_phi(about.predict, method),
        encode=_with_phi(about.encode, method), keys=keys, base=evaluation.content_key(about.base, *told),
        load=None, save=None)


def split(params: Any, method: adapters.Method) -> tuple[Any, Any]:
    """(the network's own weights, φ) of such parameters."""
    names = [name for name in tree.flatten(params) if name.endswith(tuple(f".{part}" for part in method.parts))]
    phi, base = tree.partition(params, names)
    return base, phi


@functools.cache
def _with_phi(apply: Callable, method: adapters.Method) -> Callable:
    """`apply` of parameters that hold φ too."""
    def run(params, *inputs):
        base, phi = split(params, method)
        return adapters.adapted(apply, method)(base, phi, *inputs)
    return run


def task_vectors(bench: Bench, method: adapters.Method, folder, *, progress: bool | None = None) -> dict[str, Any]:
    """{task: φ_t − φ0}, from `folder` where method, recipe, data and base are the same.

    Several processes share the tasks (`sharing.each`).
    """
    return sharing.each(bench.usual.tasks, lambda task: vector(bench, method, task, folder, progress=progress).tau)


class Adapted(NamedTuple):
    """φ_t − φ0, and the seconds that it took."""

    tau: Any
    seconds: float


def vector(bench: Bench, method: adapters.Method, task: str, folder, *, recipe: training.Recipe | None = None,
           label: str = "", progress: bool | None = None) -> Adapted:
    """The task vector of one task, reused or made now. `bench.about` is what `beside` gives.

    Weight decay is left out: it would pull (IA)³'s factors to 0, which is not where they begin.
    """
    about, recipe = bench.about, recipe or bench.usual.recipe(bench.seed)
    recipe = dataclasses.replace(recipe, weight_decay=0.0)
    path = Path(folder) / "adapters" / (label or _name(method)) / f"seed{bench.seed}" / f"{task}.safetensors"
    key = evaluation.content_key(json.dumps(dataclasses.asdict(recipe), sort_keys=True), about.keys[task]["train"])
    known = finetune.known(path)
    if known.get("key") == key:
        return Adapted(vectors.TaskVector(checkpoints.load_task_vector(path).params), known["seconds"])
    _, phi0 = split(about.theta0, method)
    state = path.with_name(f"{task}-{key[:12]}.state")
    loss, feed, frozen = talos_tuning.ingredients(bench, task, recipe)
    fitted = training.fit_sparse(loss, about.theta0, calibration.full(phi0), feed, recipe, frozen=frozen,
                                 place=training.own_rows, state_dir=state, save_every=finetune.SAVE_EVERY,
                                 progress=progress)
    tau = jax.device_get(vectors.task_vector(split(fitted.params, method)[1], phi0))
    finetune.keep(path, tau, {"key": key, "seconds": fitted.seconds}, base=about.base, state=state)
    bench.say(f"{label or _name(method)}, {task}, seed {bench.seed}: fine-tuned in {fitted.seconds:.0f} s")
    return Adapted(tau, fitted.seconds)


class Dense(NamedTuple):
    """A task vector of the network's own weights, the seconds that it took, and how many numbers were tuned."""

    tau: Any
    seconds: float
    trained: int


def dense(bench: Bench, method: adapters.Method, task: str, folder, **more) -> Dense:
    """The task vector of the network's own weights that does what φ does.

    `bench` is that of the network without adapters. (IA)³'s change of the weights, (l − 1) ⊙ W, is linear in the
    factors, so that sums and scales of such vectors are those of the factors themselves.
    """
    about = beside(bench.about, method, seed=bench.seed)
    made = vector(bench._replace(about=about), method, task, folder, **more)
    phi0 = split(about.theta0, method)[1]
    tau = adapters.dense(method, bench.about.theta0, vectors.add(phi0, made.tau), sites(bench.about))
    return Dense(jax.device_get(tau), made.seconds, tree.size(phi0))


def _name(method: adapters.Method) -> str:
    return next(name for name, kind in adapters.METHODS.items() if isinstance(method, kind))
