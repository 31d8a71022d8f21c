"""Sparse task vectors of a plan: a mask for each task, fine-tuning on it, both kept on disk, reused by their hash."""
import dataclasses
import json
import pathlib
import shutil
import time
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tvjax import calibration, evaluation, sharding, training, tree, vectors
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


class Place(NamedTuple):
    """Where a task's sparse vector and mask are kept, and the hash of what they follow from."""

    vector: pathlib.Path
    mask: pathlib.Path
    key: str

    @property
    def cost(self) -> dict[str, float] | None:
        """What the vector there took; None where it is not there or follows from something else."""
        about, masked = finetune.known(self.vector), sharding.decided(self.mask.exists)
        return about["cost"] if about.get("key") == self.key and masked else None


def place(bench: Bench, tuning: Tuning, task: str, folder) -> Place:
    """The files of one way, seed and task."""
    path = pathlib.Path(folder) / "methods" / tuning.label / f"seed{bench.seed}" / f"{task}.safetensors"
    key = evaluation.content_key(
        tuning.name, json.dumps(tuning.options, sort_keys=True), dataclasses.asdict(recipe(bench, tuning)),
        bench.about.keys[task]["train"], bench.about.keys[task]["val"])
    return Place(path, path.with_name(f"{task}.mask.safetensors"), key)


def tuned(bench: Bench, tuning: Tuning, folder, *, budget: int, progress=None) -> dict[str, Sparse]:
    """{task: its sparse task vector}, from `folder` where options, recipe, data and base are the same.

    All masks come first: their tensors together are those of one compiled step for all tasks.
    """
    places = {task: place(bench, tuning, task, folder) for task in bench.usual.tasks}
    costs = {task: where.cost for task, where in places.items()}
    masks = {task: _mask(bench, tuning, task, budget, progress) for task, cost in costs.items() if cost is None}
    union = {name for mask, _ in masks.values() for name in training.touched(mask)}
    made = {}
    for task, where in places.items():
        if (cost := costs[task]) is None:
            made[task] = _tune(bench, tuning, task, where, *masks[task], union, progress)
            bench.say(f"{tuning.label}, {task}, seed {bench.seed}: mask in {made[task].calibration:.0f} s, "
                      f"fine-tuned in {made[task].seconds:.0f} s")
        else:
            made[task] = Sparse(calibration.load_sparse(where.vector), calibration.load_mask(where.mask), **cost)
    return made


def _mask(bench, tuning, task, budget, progress):
    """(mask, seconds it took)."""
    begun = time.perf_counter()
    mask = jax.device_get(MASKS[tuning.name](bench, tuning, task, budget, progress))
    return mask, time.perf_counter() - begun


def _tune(bench, tuning, task, where: Place, mask, calibrated: float, union, progress) -> Sparse:
    fitted = _fit(bench, tuning, task, mask, where.vector.with_name(f"{task}-{where.key[:12]}.state"), union, progress)
    tau = jax.device_get(vectors.task_vector(fitted.params, bench.about.theta0))
    cost = {"calibration": calibrated, "seconds": fitted.seconds}
    sharding.once(lambda: _keep(where, mask, tau, cost, bench.about.base))
    return Sparse(tau, mask, **cost)


def _keep(where: Place, mask, tau, cost, base) -> None:
    beside = where.vector.with_suffix(".json")
    beside.unlink(missing_ok=True)  # never an old key beside a new vector
    calibration.save_mask(mask, where.mask)
    calibration.save_sparse(tau, where.vector, base=base)
    workdir.write_text(beside, json.dumps({"key": where.key, "cost": cost}) + "\n")


def recipe(bench: Bench, tuning: Tuning) -> training.Recipe:
    """The plan's recipe, at the method's own learning rate where it has one."""
    usual = bench.usual.recipe(bench.seed)
    return usual if tuning.lr is None else dataclasses.replace(usual, lr=tuning.lr)


def _fit(bench: Bench, tuning: Tuning, task: str, mask, state, union, progress):
    how = {key: tuning.options[key] for key in ("moments", "norm", "off") if key in tuning.options}
    mine = recipe(bench, tuning)
    loss, feed, frozen = ingredients(bench, task, mine)
    fitted = training.fit_sparse(loss, bench.about.theta0, mask, feed, mine, frozen=frozen, place=training.own_rows,
                                 state_dir=state, save_every=finetune.SAVE_EVERY, progress=progress, tensors=union,
                                 **how)
    sharding.once(lambda: shutil.rmtree(state, ignore_errors=True))
    return fitted


def ingredients(bench: Bench, task: str, mine: training.Recipe):
    """(loss, feed, frozen) of a task, as standard fine-tuning has them."""
    head, classes = padded_head(bench, task)
    split = tuple(bench.about.splits[task]["train"])
    feed = training.recipe_batches(split, mine)
    loss = finetune.loss(bench.about.predict, mine.label_smoothing, bench.about.criterion)
    return loss, feed, (head, jnp.int32(classes))


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
    fitted = training.fit(loss, bench.about.theta0, feed, short, frozen=frozen, place=training.own_rows,
                          progress=progress)
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
