"""Sparse task vectors of a plan: a mask for each task, fine-tuning on it, both kept on disk, reused by their hash."""
import dataclasses
import functools
import json
import pathlib
import shutil
import time
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import calibration, evaluation, training, tree, vectors
from tvjax.experiment import finetune, workdir
from tvjax.experiment.study import Bench
from tvjax.experiment.talos_plan import Tuning

SCORING = ("sparsity", "rounds", "score", "samples", "batches_per_round", "batch", "soft")


class Sparse(NamedTuple):
    """A task vector, the mask it was tuned on, and what both took: seconds of calibration and of fine-tuning."""

    tau: Any
    mask: Any
    calibration: float
    seconds: float
    reused: bool


def tuned(bench: Bench, tuning: Tuning, task: str, folder, *, budget: int, progress=None) -> Sparse:
    """The task vector of one way of fine-tuning, from `folder` where options, recipe, data and base are the same."""
    path = pathlib.Path(folder) / "methods" / tuning.label / f"seed{bench.seed}" / f"{task}.safetensors"
    key = evaluation.content_key(
        tuning.name, json.dumps(tuning.options, sort_keys=True), dataclasses.asdict(recipe(bench, tuning)),
        bench.about.keys[task]["train"], bench.about.keys[task]["val"])
    about = finetune._about(path)
    masked = path.with_name(f"{task}.mask.safetensors")
    if about.get("key") == key and masked.exists():
        return Sparse(calibration.load_sparse(path), calibration.load_mask(masked), **about["cost"], reused=True)
    begun = time.perf_counter()
    mask = jax.device_get(MASKS[tuning.name](bench, tuning, task, budget, progress))
    calibrated = time.perf_counter() - begun
    fitted = _fit(bench, tuning, task, mask, path.with_name(f"{task}-{key[:12]}.state"), progress)
    tau = jax.device_get(vectors.task_vector(fitted.params, bench.about.theta0))
    cost = {"calibration": calibrated, "seconds": fitted.seconds}
    path.with_suffix(".json").unlink(missing_ok=True)  # never an old key beside a new vector
    calibration.save_mask(mask, masked)
    calibration.save_sparse(tau, path, base=bench.about.base)
    workdir.write_text(path.with_suffix(".json"), json.dumps({"key": key, "cost": cost}) + "\n")
    return Sparse(tau, mask, **cost, reused=False)


def recipe(bench: Bench, tuning: Tuning) -> training.Recipe:
    """The plan's recipe, at the method's own learning rate where it has one."""
    usual = bench.usual.recipe(bench.seed)
    return usual if tuning.lr is None else dataclasses.replace(usual, lr=tuning.lr)


def _fit(bench: Bench, tuning: Tuning, task: str, mask, state, progress):
    how = {key: tuning.options[key] for key in ("moments", "norm", "off") if key in tuning.options}
    mine = recipe(bench, tuning)
    loss, feed, frozen = ingredients(bench, task, mine)
    fitted = training.fit_sparse(loss, bench.about.theta0, mask, feed, mine, frozen=frozen, state_dir=state,
                                 save_every=finetune.SAVE_EVERY, progress=progress, **how)
    shutil.rmtree(state, ignore_errors=True)
    return fitted


def ingredients(bench: Bench, task: str, mine: training.Recipe):
    """(loss, feed, frozen) of a task, as standard fine-tuning has them."""
    head, classes = padded_head(bench, task)
    split = tuple(bench.about.splits[task]["train"])
    feed = functools.partial(training.batches, split, batch=mine.batch, seed=mine.seed)
    return finetune.loss(bench.about.predict, mine.label_smoothing), feed, (head, jnp.int32(classes))


def padded_head(bench: Bench, task: str):
    """(head padded to the suite's widest, its classes): all tasks share one compiled program."""
    head = bench.about.heads[task]
    return jnp.pad(jnp.asarray(head), ((0, 0), (0, bench.about.width - head.shape[1]))), head.shape[1]


# ---------------------------------------------------------------- masks
def calibrated(bench: Bench, task: str, options, budget: int, keep: str = "lowest") -> calibration.Calibrated:
    """The TaLoS mask of a task, from inputs of its validation split."""
    names = calibration.scored(bench.about.theta0)
    scored, frozen = tree.partition(bench.about.theta0, names)
    head, classes = padded_head(bench, task)
    inputs, _ = bench.about.splits[task]["val"]
    chosen = {key: options[key] for key in SCORING}
    return calibration.calibrate(
        calibration.of_classifier(bench.about.predict), scored, inputs, frozen, head, np.int32(classes),
        seed=bench.seed, budget=budget, keep=keep, **chosen)


def _talos(bench, tuning, task, budget, progress, keep="lowest"):
    mask = calibrated(bench, task, tuning.options, budget, keep).mask
    if tuning.options["embeddings"] == "frozen":
        return mask
    rest = tree.partition(bench.about.theta0, list(tree.flatten(mask)))[1]
    return tree.union(mask, calibration.full(rest))


def _top(bench, tuning, task, budget, progress):
    return _talos(bench, tuning, task, budget, progress, keep="highest")


def _lota(bench, tuning, task, budget, progress):
    """Where the weights of a short standard fine-tuning moved most."""
    steps = tuning.options["steps"]
    short = dataclasses.replace(recipe(bench, tuning), steps=steps, warmup=min(steps - 1, recipe(bench, tuning).warmup))
    loss, feed, frozen = ingredients(bench, task, short)
    fitted = training.fit(loss, bench.about.theta0, feed, short, frozen=frozen, progress=progress)
    tau = vectors.task_vector(fitted.params, bench.about.theta0)
    return calibration.lota(dict(tau), density=1 - tuning.options["sparsity"])


def _scored(bench):
    return tree.partition(bench.about.theta0, calibration.scored(bench.about.theta0))[0]


def _random(bench, tuning, task, budget, progress):
    seed = int(np.random.SeedSequence((bench.seed, zlib.crc32(task.encode()))).generate_state(1)[0] >> 1)
    return calibration.at_random(_scored(bench), density=1 - tuning.options["sparsity"], seed=seed)


def _magnitude(bench, tuning, task, budget, progress, keep="highest"):
    return calibration.by_magnitude(_scored(bench), density=1 - tuning.options["sparsity"], keep=keep)


def _small_magnitude(bench, tuning, task, budget, progress):
    return _magnitude(bench, tuning, task, budget, progress, keep="lowest")


def _within(bench, tuning, task, budget, progress):
    names = calibration.scored(bench.about.theta0, within=tuning.options["within"])
    return calibration.full(tree.partition(bench.about.theta0, names)[0])


MASKS = {"talos": _talos, "top_sensitivity": _top, "lota": _lota, "random": _random, "magnitude": _magnitude,
         "small_magnitude": _small_magnitude, "attention": _within, "bitfit": _within}
