"""Task vectors of a plan: fine-tuned here, read from a model that the plan names, or reused from an earlier run.

A task vector is reused where recipe, seed, data, head and pretrained weights are the same, by their hash.
"""
import functools
import json
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tvjax import checkpoints, evaluation, sharding, training, vectors
from tvjax.experiment import workdir as files
from tvjax.experiment.loading import Problem, check_finite, over_classes

SAVE_EVERY = 200  # steps between saved states, from which an interrupted run goes on
FAR = 0.5  # ‖θ − θ0‖/‖θ0‖: fine-tuned models stay well below it, unrelated ones lie about √2


class Tuned(NamedTuple):
    """A task vector and what it took; `reused` where an earlier run made it, `note` a warning or ""."""

    tau: Any
    ratio: float
    seconds: float
    rate: float
    loss: float
    reused: bool
    note: str


def finetune(problem: Problem, plan, task: str, *, seed: int, workdir, progress=None) -> Tuned:
    """The task vector of one task and seed; `workdir` keeps it, and the state of a run that is interrupted."""
    path = vector_path(workdir, task, seed)
    if task in plan.finetuned:
        return _given(problem, plan, task, path)
    key = evaluation.content_key(dict(plan.finetune), seed, problem.keys[task]["train"])
    about = known(path)
    if about.get("key") == key:
        tau = vectors.TaskVector(checkpoints.load_task_vector(path).params)
        return _tuned(problem, task, tau, reused=True, **about["cost"])
    state = pathlib.Path(workdir) / "state" / f"{task}-{seed}-{key[:12]}"
    fitted = _fit(problem, plan.recipe(seed), task, state, progress)
    tau = jax.device_get(vectors.task_vector(fitted.params, problem.theta0))
    cost = {"seconds": fitted.seconds, "rate": fitted.rate, "loss": float(fitted.losses[-1])}
    keep(path, tau, {"key": key, "cost": cost}, base=problem.base, state=state)
    return _tuned(problem, task, tau, reused=False, **cost)


def vector_path(workdir, task: str, seed: int) -> pathlib.Path:
    """Where the task vector of a task and seed is kept."""
    return pathlib.Path(workdir) / "task_vectors" / f"seed{seed}" / f"{task}.safetensors"


def _fit(problem, recipe, task, state, progress):
    head = problem.heads[task]
    width = head.shape[1] if recipe.label_smoothing else problem.width
    frozen = (jnp.pad(head, ((0, 0), (0, width - head.shape[1]))), jnp.int32(head.shape[1]))
    split = tuple(problem.splits[task]["train"])
    feed = training.recipe_batches(split, recipe)
    mine = loss(problem.predict, recipe.label_smoothing, problem.criterion)
    return training.fit(mine, problem.theta0, feed, recipe, frozen=frozen, place=training.own_rows, state_dir=state,
                        save_every=SAVE_EVERY, progress=progress)


@functools.cache
def loss(predict, smoothing: float, criterion=over_classes):
    """(params, (inputs, labels), key, (head, classes)) -> a problem's criterion, by default cross-entropy."""
    def loss(params, batch, key, frozen):
        inputs, labels = batch
        score = lambda head, inputs: predict(params, head, inputs)
        return criterion(score, *frozen, inputs, labels, smoothing=smoothing)
    return loss


def known(path) -> dict:
    """What the file beside a task vector says of it; {} where either is not there."""
    return sharding.decided(lambda: _known(path))


def _known(path) -> dict:
    beside = path.with_suffix(".json")
    if not path.exists() or not beside.exists():
        return {}
    try:
        return json.loads(beside.read_text())
    except ValueError:
        return {}


def keep(path, tau, about: dict, *, base: str, state=None, **more) -> None:
    """A task vector and, beside it, what `known` says of it from now on; the state of its training goes."""
    def write():
        beside = path.with_suffix(".json")
        beside.unlink(missing_ok=True)  # never an old key beside a new vector
        checkpoints.save_task_vector(tau, path, base=base, **more)
        files.write_text(beside, json.dumps(about) + "\n")
        if state is not None:
            shutil.rmtree(state, ignore_errors=True)
    sharding.once(write)


def _given(problem, plan, task, path) -> Tuned:
    """τ of a fine-tuned model that the plan names."""
    theta = problem.load(plan.finetuned[task])
    if not plan.allow_nonfinite:
        check_finite(theta, plan.finetuned[task])
    tau = jax.device_get(vectors.task_vector(theta, problem.theta0))
    keep(path, tau, {"key": "", "cost": {}}, base=problem.base)
    return _tuned(problem, task, tau, seconds=0.0, rate=0.0, loss=0.0, reused=True)


def _tuned(problem, task, tau, *, seconds, rate, loss, reused) -> Tuned:
    ratio = float(vectors.norm(tau) / vectors.norm(problem.theta0))
    note = "" if ratio < FAR else (
        f"{task}: the fine-tuned model is far from the pretrained one, ‖θ − θ0‖/‖θ0‖ = {ratio:.2f} (fine-tuning stays "
        f"well below {FAR:g}, unrelated models lie about 1.41): it may start from another base")
    return Tuned(tau, ratio, seconds, rate, loss, reused, note)
